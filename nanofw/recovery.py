"""After a call that broke off half-way: every request begins again, and nothing that was told is told twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanofw.request import RequestOutput

if TYPE_CHECKING:
    from nanofw.engine import Engine


def put_back(engine: Engine) -> None:
    """Let every request begin again, with the tokens that were looked at.

    Table, KV cache and scheduler are emptied, whatever state the broken call left them in. It may be called again where
    it broke off itself.
    """
    engine._in_flight.clear()
    reported = {output.request_id: output for output in engine._ready if output.finished}
    leaders = list(engine.requests.values())
    told = {(o.request_id, o.outputs[0].index): o.outputs[0] for o in engine._ready if not o.finished}
    for sample in (sample for leader in leaders for sample in leader.samples or (leader,)):
        if last := told.get((sample.id, sample.index)):
            sample.told, sample.over = len(last.text), last.finish_reason is not None
        if not sample.over and sample.finish_reason != "abort":
            sample.finish_reason = None
        if sample.row >= 0:
            sample.output_ids = engine.table.output_ids(sample.row, len(sample.prompt_ids))
            sample.preemptions += 1
        sample.row = -1
    engine.table.clear()
    engine.kv_cache.recover()
    engine.scheduler.clear()
    for leader in leaders:
        for sample in leader.unfinished:
            sample.forget_unread()
            if not (reason := sample.due):
                engine.scheduler.add(sample)
                continue
            if sample.unborn:
                engine._begin_others(sample)
            engine._finish(sample, reason)
        if leader.id in engine.requests and not (leader.unborn or leader.unfinished):  # broke off as it ended
            for sample in leader.samples or (leader,):
                sample.read_rest()
            output = reported.get(leader.id) or RequestOutput.last(leader)
            engine._ready += [output] if leader.id not in reported else []
            engine._forget(leader, output)

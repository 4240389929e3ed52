"""`nanofw generate`: text in, text out."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanofw.cli.console import quiet_libraries, resolved_json, status, tell
from nanofw.cli.experiment import Quiet
from nanofw.cli.settings import Settings, with_settings
from nanofw.progress import watching

if TYPE_CHECKING:
    from nanofw.llm import LLM
    from nanofw.request import CompletionOutput, RequestOutput, SamplingParams


@with_settings()
def generate(
    settings: Settings,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="One or more.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Keep the K likeliest; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Keep this much of the mass.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End at this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    logprobs: Annotated[int | None, typer.Option(metavar="K", help="Report the K likeliest tokens.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Do not use the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    quiet: Quiet = False,
) -> None:
    """Generate text, in the model's chat template where it has one.

    Example: nanofw generate "Why is the sky blue?" --max-tokens 32
    """
    from nanofw.request import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    config = settings.resolve()
    quiet_libraries()
    from nanofw.llm import LLM

    with status(quiet) as say, watching(say):
        llm = LLM(config=config)
    tell(llm.engine.notes)
    chat = not no_chat and llm.tokenizer.chat_template is not None
    inputs: list[Any] = [llm.chat_prompt(p) if chat else p for p in prompts]
    if as_json:
        outputs = llm.generate(inputs, params)
        report = {
            "outputs": [_record(p, o) for p, o in zip(prompts, outputs, strict=True)],
            "resolved": resolved_json(llm.engine.resolved),
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    elif len(prompts) == 1:
        _stream(llm, inputs, params)
    else:
        for number, (prompt, output) in enumerate(zip(prompts, llm.generate(inputs, params), strict=True)):
            print(f"{'' if number == 0 else chr(10)}=== {prompt}\n{output.outputs[0].text}")
            _print_logprobs(llm, output.outputs[0])


def _stream(llm: LLM, inputs: list[Any], params: SamplingParams) -> None:
    last = None
    for last in llm.stream(inputs, params):
        sys.stdout.write(last.delta)
        sys.stdout.flush()
    print()
    if last is not None:
        _print_logprobs(llm, last.outputs[0])


def _print_logprobs(llm: LLM, output: CompletionOutput) -> None:
    for entry in output.logprobs or ():
        chosen, *others = (
            f"{llm.tokenizer.decode([token], skip_special_tokens=False)!r} {logprob:.3f}"
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top)
        )
        print(chosen + (f"  of  {', '.join(others)}" if others else ""))


def _record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "cached_tokens": output.cached_tokens,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [
            {"token_id": e.token_id, "logprob": e.logprob, "top": [list(pair) for pair in e.top]}
            for e in completion.logprobs
        ]
    return record

"""`nanofw bench`: what it measures, shows and writes. No test here looks at how long anything took."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from nanofw.cli.experiment import combinations, label_of
from nanofw.errors import ConfigError

SMALL = ("--model", "dummy:tiny", "--prompt-tokens", "5", "--output-tokens", "4", "--rounds", "2")
MEASURED = ("total_s", "tok_s", "speedup", "decode_tok_s", "decode_ms", "prefill_tok_s")


def test_report(nanofw: Any) -> None:
    args = ("--attention", "naive-gather,vectorized-gather", "--scheduler", "static,continuous")
    ran = nanofw("bench", *SMALL, *args, "--batch-sizes", "2,1,4", "--json", "out.json")
    assert ran.code == 0
    report = json.loads(Path("out.json").read_text())
    assert set(report) == {
        *("format", "machine", "telemetry", "waited", "settings", "combinations", "points"),
        *("roof", "roofline", "explained", "laws"),
    }
    assert report["settings"] == {"rounds": 2, "seed": 0, "batch_sizes": [1, 2, 4], "output_tokens": 4}
    assert report["machine"]["python"]
    assert report["machine"]["gpu"] is None or report["machine"]["gpu"]["name"]
    points = {(p["attention"], p["scheduler"], p["batch"]): p for p in report["points"]}
    assert len(points) == len(report["points"]) == 2 * 2 * 3
    for (attention, scheduler, batch), p in points.items():
        label = f"{attention} + {scheduler}"
        assert report["combinations"][label]["resolved"]["attention"]["name"] == attention
        assert report["combinations"][label]["resolved"]["scheduler"]["name"] == scheduler
        assert (p["model"], p["model_impl"], p["kv_cache"], p["runner"]) == (
            "dummy:tiny",
            "transformers",
            "paged",
            "eager",
        )
        assert (p["prompt_tokens"], p["tokens"]) == (5 * batch, 4 * batch)
        for name in MEASURED:
            assert len(p[name]["rounds"]) == 2
            assert p[name]["median"] == statistics.median(p[name]["rounds"]) > 0
        base = points[attention, scheduler, 1]
        ratios = [x / y for x, y in zip(p["tok_s"]["rounds"], base["tok_s"]["rounds"], strict=True)]
        assert p["speedup"]["rounds"] == ratios


def test_tables_tell_what_ran_and_a_sentence_closes(nanofw: Any) -> None:
    ran = nanofw("bench", *SMALL, "--attention", "naive-gather,vectorized-gather", "--batch-sizes", "1,2")
    lines = ran.out.splitlines()
    header = ["batch", "total", "throughput", "tokens", "speed-up", "decode", "per", "step", "prefill"]
    assert [line.split() for line in lines].count(header) == 2
    for name in ("naive-gather", "vectorized-gather"):
        assert any(line.strip() == name for line in lines)
        assert any(line.startswith(f"attention: {name} (nanofw ") for line in lines)
    assert sum(line.startswith("KV cache: ") for line in lines) == 2
    last = lines[-1].split("; ")
    assert last[0].startswith("naive-gather: batch 2 gives ")
    assert last[1].startswith("vectorized-gather: batch 2 gives ")
    assert last[1].endswith("x the throughput of batch 1.")
    assert ran.err == ""


def test_prompt_is_a_text_where_a_model_is_named(nanofw: Any) -> None:
    args = ("--model", "dummy:tiny", "--output-tokens", "2", "--rounds", "1", "--batch-sizes", "1", "--json", "o.json")
    counts = {}
    for name, extra in {"own": (), "given": ("--prompt", "Hi")}.items():
        assert nanofw("bench", *args, *extra, "--attention", "vectorized-gather").code == 0
        counts[name] = json.loads(Path("o.json").read_text())["points"][0]["prompt_tokens"]
    assert counts["given"] < counts["own"]


def test_defaults_are_below_environment_and_file(nanofw: Any) -> None:
    Path("nanofw.toml").write_text('model = "dummy:llama-tiny"\n')
    args = ("--prompt-tokens", "3", "--output-tokens", "2", "--rounds", "1", "--batch-sizes", "1", "--json", "o.json")
    assert nanofw("bench", *args, NANOFW_ATTENTION="vectorized-gather").code == 0
    (point,) = json.loads(Path("o.json").read_text())["points"]
    assert (point["model"], point["attention"]) == ("dummy:llama-tiny", "vectorized-gather")
    assert nanofw("bench", *args).code == 0
    points = json.loads(Path("o.json").read_text())["points"]
    assert [p["attention"] for p in points] == ["naive-gather", "vectorized-gather"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--batch-sizes", "1,x"), "--batch-sizes"),
        (("--batch-sizes", "0,1"), "--batch-sizes"),
        (("--prompt", "x"), "--prompt-tokens"),
        (("--rounds", "0"), "rounds must be at least 1"),
        (("--output-tokens", "1"), "output_tokens must be at least 2"),
        (("--prompt-tokens", "0"), "prompt_tokens must be at least 1"),
        (("--attention", "naive-gather,naive-gather"), "distinct"),
        (("--attention", "naive-gather,nosuch"), "nosuch"),
        (("--json", "no/such/folder.json"), "cannot write no/such/folder.json: No such file or directory"),
        (("--json", "."), "cannot write .: Is a directory"),
        (("--json", "/proc/x.json"), "cannot write /proc/x.json"),
        (("--kv-memory", "100TiB"), "does not fit into memory: lower kv_memory or kv_blocks"),
        (("--batch-sizes", "8", "--max-num-seqs", "4"), "exceeds max_num_seqs=4"),
        (("--max-model-len", "7"), "larger max_model_len"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(nanofw: Any, args: tuple[str, ...], words: str) -> None:
    assert words in nanofw("bench", *SMALL, "--attention", "vectorized-gather", *args).error_line


def test_combinations_are_the_product_of_the_lists() -> None:
    configs = combinations({"attention": "a, b", "runner": "r", "scheduler": "s,t", "seed": 3})
    assert [(c.attention, c.scheduler, c.runner, c.seed) for c in configs] == [
        ("a", "s", "r", 3),
        ("a", "t", "r", 3),
        ("b", "s", "r", 3),
        ("b", "t", "r", 3),
    ]
    assert [label_of(c, configs) for c in configs] == ["a + s", "a + t", "b + s", "b + t"]
    assert label_of(configs[0], configs[:1]) == "a"
    with pytest.raises(ConfigError, match="attention"):
        combinations({"attention": "a,"})


def test_accept_is_a_command_of_its_own(nanofw: Any) -> None:
    recorded = Path(__file__).parents[1] / "measure" / "recorded" / "cpu.json"
    ran = nanofw("bench", "accept", str(recorded), "--into", "here")
    assert (ran.code, ran.out) == (0, "wrote here/intel-xeon-processor-2-cores-1-threads.json: commit it\n")
    assert "cannot read .benchmarks/last-run.json" in nanofw("bench", "accept").error_line
    line = nanofw("bench", "--attention", "naive-gather", "--rounds", "2", "accept", str(recorded)).error_line
    assert "bench accept measures nothing and takes no" in line
    assert "attention" in line
    assert "rounds" in line

"""Run the suites on right plugins again and again, each time with other random numbers, beside a busy loop.

    python benchmarks/soak_suites.py --runs 20

A suite that fails a right plugin now and then would be ignored when it is right to fail. Each run gets a seed of its
own: of what Hypothesis draws, and of the numbers in the other cases (`NANOFW_TEST_SEED`). Not part of CI.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

TESTS = (
    "tests/nanofw_gather",
    "tests/nanofw_cudagraph",
    "tests/nanofw_basics/test_contiguous_cache.py",
    "tests/nanofw_basics/test_eager.py",
    "tests/nanofw_basics/test_paged_cache.py",
    "tests/nanofw_basics/test_prefix_cache.py",
    "tests/nanofw_basics/test_sampler.py",
    "tests/nanofw_basics/test_schedulers.py",
    "tests/nanofw_basics/test_transformers_model.py::TestTransformers",
)


def main() -> None:
    """Print each run, then how many were clean; exits with 1 if one was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("tests", nargs="*", default=TESTS)
    chosen = parser.parse_args()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    clean = 0
    try:
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.runs):
            clean += run(seed, chosen.tests)
    finally:
        busy.terminate()
    print(f"{clean} of {chosen.runs} runs are clean")
    sys.exit(clean < chosen.runs)


def run(seed: int, tests: list[str]) -> bool:
    """Whether one run has no failure."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", *tests],
        env=os.environ | {"NANOFW_TEST_SEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()
    print(f"seed {seed}: {counts} ({time.perf_counter() - started:.0f} s with start)", flush=True)
    for line in re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE):
        print(f"  {line}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()

"""The least a step could take: exact in what it counts, measured once a machine."""

import json

import pytest
import torch

from nanofw.kv_cache import LayerSpec
from nanofw.measure import roofline
from nanofw.measure.roofline import Floor, Roof, floor, roof_of
from nanofw.model import ModelSpec

CPU, FP32 = torch.device("cpu"), torch.float32
LAYER = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, scale=1.0)
ROOF = Roof("cpu", "float32", read_bandwidth=1e9, flops=1e12)


def spec(*layers, weight_bytes=4_000_000):
    return ModelSpec(layers, vocab_size=10, max_len=1000, dtype=FP32, device=CPU, weight_bytes=weight_bytes)


def test_weights_once_and_contexts_each():
    found = floor(spec(LAYER, LAYER), batch=3, context=100, roof=ROOF)
    kv = 2 * 2 * 64 * 4  # key and value, Hkv heads, D numbers of 4 bytes
    assert found.bytes == 4_000_000 + 2 * 3 * (100 + 1) * kv
    assert found.flops == 2 * 3 * 1_000_000 + 2 * 3 * 4 * 100 * 8 * 64
    assert found.ms == pytest.approx(1e3 * found.bytes / 1e9)
    assert found.bound == "memory"


def test_a_window_bounds_the_context():
    narrow = LayerSpec(8, 2, 64, 1.0, window=10)
    assert floor(spec(narrow), 1, 500, ROOF) == floor(spec(narrow), 1, 10, ROOF)


def test_a_slow_processor_is_bound_by_compute():
    found = floor(spec(LAYER), 1, 100, Roof("cpu", "float32", 1e12, 1e9))
    assert isinstance(found, Floor)
    assert (found.bound, found.ms) == ("compute", pytest.approx(1e3 * found.flops / 1e9))


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A cache of its own, and little to measure."""
    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 64})
    return tmp_path / "roofs"


def test_measured_once_a_machine(small, monkeypatch):
    first = roof_of(CPU, FP32)
    assert first.read_bandwidth > 1e6
    assert first.flops > 1e6
    monkeypatch.setattr(roofline, "measured", lambda *_: pytest.fail("measured again"))
    assert roof_of(CPU, FP32) == first
    assert [path.suffix for path in small.iterdir()] == [".json"]


def test_another_machine_is_another_roof(small, monkeypatch):
    roof_of(CPU, FP32)
    real = roofline.describe()
    monkeypatch.setattr(roofline, "describe", lambda: real | {"cpu": "another"})
    monkeypatch.setattr(roofline, "measured", lambda *_: ROOF)
    assert roof_of(CPU, FP32) == ROOF


@pytest.mark.parametrize("text", ["", "{", json.dumps({"device": "cpu"})])
def test_a_spoiled_file_is_measured_again(small, monkeypatch, text):
    monkeypatch.setattr(roofline, "measured", lambda *_: ROOF)
    roof_of(CPU, FP32)
    (file,) = small.iterdir()
    file.write_text(text)
    assert roof_of(CPU, FP32) == ROOF
    assert json.loads(file.read_text())["flops"] == 1e12


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOFW_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(roofline, "measured", lambda *_: ROOF)
    assert roof_of(CPU, FP32) == ROOF

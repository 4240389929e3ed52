"""Which plugins a benchmark puts in place of which."""

from __future__ import annotations

from nanofw.config import Config
from nanofw.measure.combinations import one_at_a_time


def test_each_plugin_alone(host):
    found = one_at_a_time(host, on_gpu=False)
    assert found["plain"] == {}
    assert found["attention=naive-gather"] == {"attention": "naive-gather"}
    assert found["scheduler=static"] == {"scheduler": "static"}
    assert "fast" not in found
    plain = Config()
    for settings in found.values():
        config = Config.build(settings)
        assert sum(getattr(config, name) != getattr(plain, name) for name in Config.__dataclass_fields__) <= 1
    assert "attention=vectorized-gather" not in found  # it is the plain one


def test_on_a_gpu(host):
    found = one_at_a_time(host, on_gpu=True)
    assert found["plain"] == {"attention": "triton-paged"}
    assert found["attention=vectorized-gather"] == {"attention": "vectorized-gather"}
    assert found["kv_cache=prefix"] == {"attention": "triton-paged", "kv_cache": "prefix"}
    assert found["fast"]["runner"] == "cuda-graph"

"""All hooks of nanofw. A plugin is a module or object that implements some of them with `@nanofw.hookimpl`.

Hooks run when plugins are loaded and, for observers, once a step or request: never once a layer, where the microseconds
of a hook call would count. Each example below is a whole plugin module, and works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from nanofw.attention import Attention
    from nanofw.component import Component
    from nanofw.events import EngineCreated, RequestFinished, StepFinished
    from nanofw.kv_cache import KVCache
    from nanofw.model import Model
    from nanofw.runner import Runner
    from nanofw.sampler import Sampler
    from nanofw.scheduler import Scheduler

PROJECT = "nanofw"
API = (1, 0)
"""Version of the contracts. A plugin declares the one it was written for as `nanofw_api`; the first number must match,
and the second may be lower than ours."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

C_contra = TypeVar("C_contra", bound="Component", contravariant=True)


class Register(Protocol[C_contra]):
    """Registers one component of a kind under the name users select it by."""

    def __call__(self, name: str, target: type[C_contra] | str) -> None:
        """Register `target` as `name`.

        Args:
            name: what a setting or `--KIND NAME` selects it by.
            target: the class, or "package.module:Class" where importing it is costly or can fail: it is imported when
                first used, and an import error then becomes the reason why it is unavailable.

        Raises:
            PluginError: the name is taken, or the class is not of this kind or not whole: the plugin is left out.
        """


@hookspec
def nanofw_register_model(register: Register[Model]) -> None:
    """Register models: they load weights and turn a step into logits. Called once, when plugins are loaded.

    An engine builds the chosen one with the source of the weights, dtype, device and options, and calls `forward` once
    a step: token ids and positions `[T]` int64 on the device in, logits `[B, V]` out.

    Args:
        register: takes a name and a subclass of `nanofw.Model`; users select it by `model_impl`.

    Raises:
        PluginError: see `Register`. Its `__init__` may raise CheckpointError, naming file and tensor.

    Example:
        Logits that depend on the last token alone::

            import nanofw
            import torch
            nanofw_api = (1, 0)

            class Bigram(nanofw.Model):
                def __init__(self, source, dtype, device, options):
                    layer, size = nanofw.LayerSpec(1, 1, head_size=8, scale=1.0), source.config.vocab_size
                    self.spec = nanofw.ModelSpec((layer,), size, 64, dtype, device)
                    self.logits = torch.randn(size, size, dtype=dtype, device=device)

                def forward(self, batch, attention, kv):
                    return self.logits[batch.token_ids[batch.logits_indices]]

            @nanofw.hookimpl
            def nanofw_register_model(register):
                register("bigram", Bigram)
    """


@hookspec
def nanofw_register_attention(register: Register[Attention]) -> None:
    """Register attentions: they write K and V and attend over the cache. Called once, when plugins are loaded.

    An engine builds the chosen one if its `capabilities` cover the model. Once a layer, `attend` is given q
    `[T, Hq, D]` and the layer's cache in its named layout, and gives `[T, Hq, D]`, dtype and device of q.

    Args:
        register: takes a name and a subclass of `nanofw.Attention`; users select it by `attention`.

    Raises:
        PluginError: see `Register`. What `validate` lists is refused with all reasons when an engine is built.

    Example:
        The formula, one request after another::

            import nanofw
            import torch
            nanofw_api = (1, 0)

            class Formula(nanofw.Attention):
                def attend(self, q, kv, batch):
                    out, group = [], kv.spec.num_heads // kv.spec.num_kv_heads
                    for x, table, s in zip(q.split(batch.query_lens_host.tolist()), batch.block_table, batch.seq_lens):
                        k, v = (c[table].flatten(0, 1)[:s].repeat_interleave(group, 1) for c in (kv.key, kv.value))
                        scores = torch.einsum("qhd,khd->hqk", x, k) * kv.spec.scale
                        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(s - len(x) + 1)
                        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
                    return torch.cat(out)

            @nanofw.hookimpl
            def nanofw_register_attention(register):
                register("formula", Formula)
    """


@hookspec
def nanofw_register_kv_cache(register: Register[KVCache]) -> None:
    """Register KV caches: they own the storage and hand out its blocks. Called once, when plugins are loaded.

    An engine asks the chosen class for bytes and slots a block, builds it with a `KVCacheSpec`, and reads `block_table`
    `[rows, max_blocks]` int32 on the host. Rows and lengths, in tokens, reach it as int64 numpy arrays.

    Args:
        register: takes a name and a subclass of `nanofw.KVCache`; users select it by `kv_cache`.

    Raises:
        PluginError: see `Register`. An engine raises CapacityError where the storage does not fit into memory.

    Example:
        By name, so that it is imported when first used; this class is what `nanofw new NAME --kind kv-cache` writes::

            import nanofw
            nanofw_api = (1, 0)

            @nanofw.hookimpl
            def nanofw_register_kv_cache(register):
                register("plain-blocks", "nanofw.scaffold.kv_cache:MyKVCache")
    """


@hookspec
def nanofw_register_scheduler(register: Register[Scheduler]) -> None:
    """Register schedulers: they say who computes how many tokens next. Called once, when plugins are loaded.

    An engine builds the chosen one with its limits, request table and KV cache, and calls `schedule` once a step; what
    it gives are rows and numbers of tokens, int64 numpy arrays, with the blocks allocated. It sees no token values.

    Args:
        register: takes a name and a subclass of `nanofw.Scheduler`; users select it by `scheduler`.

    Raises:
        PluginError: see `Register`. An engine raises EngineError if nobody is brought forward though requests wait.

    Example:
        By name again; this class is what `nanofw new NAME --kind scheduler` writes::

            import nanofw
            nanofw_api = (1, 0)

            @nanofw.hookimpl
            def nanofw_register_scheduler(register):
                register("reserving", "nanofw.scaffold.scheduler:MyScheduler")
    """


@hookspec
def nanofw_register_runner(register: Register[Runner]) -> None:
    """Register runners: they take a planned step to the device. Called once, when plugins are loaded.

    An engine builds the chosen one with the other parts (`nanofw.Parts`), calls `warm_up` once and `submit` once a
    step. What that gives is waited for later: tokens `[B]` int64, and log-probabilities in nats, as numpy arrays.

    Args:
        register: takes a name and a subclass of `nanofw.Runner`; users select it by `runner`.

    Raises:
        PluginError: see `Register`. What `validate` lists is refused with all reasons when an engine is built.

    Example:
        Every operation of every step is launched anew::

            import nanofw
            import torch
            nanofw_api = (1, 0)

            class Launcher(nanofw.Runner):
                def __init__(self, parts, options):
                    super().__init__(parts, options)
                    self.report = nanofw.RunnerReport(path="launched")
                    self.last_token = torch.zeros(parts.rows, dtype=torch.int64, device=parts.device)

                def submit(self, step):
                    self.report.steps += 1
                    return self.run_eagerly(step, self.last_token)

            @nanofw.hookimpl
            def nanofw_register_runner(register):
                register("launcher", Launcher)
    """


@hookspec
def nanofw_register_sampler(register: Register[Sampler]) -> None:
    """Register samplers: they choose tokens. Called once, when plugins are loaded.

    An engine builds the chosen one with its options; `sample` is given logits `[B, V]` and the rows' parameters on the
    same device, and gives tokens `[B]` int64 there, with log-probabilities in nats where a row asks for them.

    Args:
        register: takes a name and a subclass of `nanofw.Sampler`; users select it by `sampler`.

    Raises:
        PluginError: see `Register`.

    Example:
        The arithmetic that samplers share, and nothing else::

            import nanofw.draw
            nanofw_api = (1, 0)

            class Shared(nanofw.Sampler):
                def sample(self, logits, sampling):
                    return nanofw.draw.sample(logits, sampling)

            @nanofw.hookimpl
            def nanofw_register_sampler(register):
                register("shared", Shared)
    """


@hookspec
def nanofw_engine_created(event: EngineCreated) -> None:
    """Observe a new engine. Called once, when it is ready: weights loaded, cache allocated, runner warmed up.

    Args:
        event: has the `engine`: its parts, settings and `resolved` plugins. It may be given requests at once.

    Raises:
        Exception: what the observer raises reaches whoever builds the engine.

    Example:
        Say what runs::

            import nanofw
            nanofw_api = (1, 0)

            @nanofw.hookimpl
            def nanofw_engine_created(event):
                print({kind: plugin.name for kind, plugin in event.engine.resolved.items()})
    """


@hookspec
def nanofw_step_finished(event: StepFinished) -> None:
    """Observe a step. Called once a step, when its tokens have arrived, on the engine's path: be quick.

    Args:
        event: numbers of requests and tokens, those that counted, requests put back; times in seconds.

    Raises:
        Exception: what the observer raises reaches the caller of `Engine.step`; outputs come with the next call.

    Example:
        Say how long each step took::

            import nanofw
            nanofw_api = (1, 0)

            @nanofw.hookimpl
            def nanofw_step_finished(event):
                print(f"step {event.index}: {event.num_tokens} tokens, {event.finished - event.started:.6f} s")
    """


@hookspec
def nanofw_request_finished(event: RequestFinished) -> None:
    """Observe the end of a request. Called once for each, whatever the reason, aborts too.

    Args:
        event: has the last `output` of the request: tokens, text, reasons. Requests may be added and aborted here.

    Raises:
        Exception: what the observer raises reaches the caller of `Engine.step` or `Engine.abort`.

    Example:
        Say why each one ended::

            import nanofw
            nanofw_api = (1, 0)

            @nanofw.hookimpl
            def nanofw_request_finished(event):
                print(event.output.request_id, event.output.outputs[0].finish_reason)
    """

"""Launch a projection by its route. One function a step of a layer; shapes are in their docstrings."""

from __future__ import annotations

from typing import Any

import torch
import triton

from nanofw.launch import launch
from nanofw.pdl import launch_options
from nanofw_fused.kernels.norm import add_norm_kernel, embed_kernel, gate_kernel
from nanofw_fused.kernels.slab import slab_kernel
from nanofw_fused.kernels.tiled import tiled_kernel
from nanofw_fused.routes import Tile


class Projector:
    """Launches kernels for one model on one device.

    Args:
        dtype: of weights and activations.
        pdl: overlap kernels by programmatic dependent launch (compute capability 9.0 and newer).
        shared: bytes of shared memory that a program may take on the device.
    """

    def __init__(self, dtype: torch.dtype, pdl: bool, shared: int) -> None:
        self.pdl, self.shared = pdl, shared
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of `table` `[V, K]` for token ids `[T]` int64: `[T, K]`."""
        k = table.shape[1]
        out = torch.empty((token_ids.shape[0], k), dtype=table.dtype, device=table.device)
        block = min(triton.next_power_of_2(k), 1024)
        grid = (token_ids.shape[0], triton.cdiv(k, block))
        launch(embed_kernel, grid, token_ids, table, out, K=k, BLOCK=block, **self._common(4))
        return out

    def slab(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        tile: Tile,
        *,
        eps: float | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """`residual + norm(x) @ weight.T`, or the gated form; the norm where `eps` is given.

        Args:
            x: `[B, K]`, B at most 16. weight: `[N, K]`, or `[2N, K]` when gated. residual: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        rows, k = x.shape
        n = weight.shape[0] // (2 if gated else 1)
        kc = min(tile.bk, max(16, triton.next_power_of_2(triton.cdiv(k, tile.warps))))
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        launch(
            slab_kernel,
            (triton.cdiv(n, tile.bn),),
            x,
            weight,
            x if residual is None else residual,
            out,
            rows,
            eps or 0.0,
            K=k,
            N=n,
            ROWS=8 if rows <= 8 else 16,
            BN=tile.bn,
            SLICES=tile.warps,
            KC=kc,
            CHUNKS=triton.cdiv(k, kc * tile.warps),
            EVEN=n % tile.bn == 0 and k % (kc * tile.warps) == 0,
            NORM=eps is not None,
            RESIDUAL=residual is not None,
            GATED=gated,
            **self._common(tile.warps),
            PRECISION=self._precision,
        )
        return out

    def tiled(self, x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, gated: bool = False) -> torch.Tensor:
        """`x @ weight.T` as `[B, N]`, or as float32 partials `[splits, B, N]`."""
        rows, k = x.shape
        n = weight.shape[0] // (2 if gated else 1)
        splits = tile.splits if k % (tile.splits * tile.bk) == 0 else 1
        shape, dtype = ((splits, rows, n), torch.float32) if splits > 1 else ((rows, n), x.dtype)
        out = torch.empty(shape, dtype=dtype, device=x.device)
        bm = 64 if rows > 16 else 16  # 64 rows are what Hopper's wgmma takes: faster than 32 even for 32
        stages = self.stages(tile, bm + tile.bn * (2 if gated else 1), x.element_size())
        launch(
            tiled_kernel,
            (triton.cdiv(n, tile.bn), triton.cdiv(rows, bm), splits),
            x,
            weight,
            out,
            rows,
            K=k,
            N=n,
            BM=bm,
            BN=tile.bn,
            BK=tile.bk,
            SPLITS=splits,
            GATED=gated,
            STAGES=stages,
            **self._common(tile.warps),
            PRECISION=self._precision,
        )
        return out

    def stages(self, tile: Tile, rows: int, item: int) -> int:
        """Loop turns in flight: the table's, where the device has room for them.

        The table was measured in bfloat16 on a card with 227 KiB a program; float32 takes twice the room, and other
        cards have less than half of it. One turn is in registers, the others wait in shared memory.

        Args:
            tile: the table's choice. rows: of x and of W that one turn loads, `tile.bk` elements each. item: bytes of
                an element.
        """
        return max(min(tile.stages, 1 + self.shared // (rows * tile.bk * item)), 1)

    def add_norm(self, hidden: torch.Tensor, parts: torch.Tensor | None, eps: float) -> torch.Tensor:
        """`hidden += parts.sum(0)` in place, then hidden over its rms.

        Args:
            hidden: `[B, K]`. parts: `[B, K]`, `[P, B, K]` or None.
        """
        rows, k = hidden.shape
        out = torch.empty_like(hidden)
        count = 0 if parts is None else parts.numel() // hidden.numel()
        launch(
            add_norm_kernel,
            (rows,),
            hidden,
            hidden if parts is None else parts,
            out,
            rows,
            eps,
            K=k,
            K_PAD=triton.next_power_of_2(k),
            PARTS=count,
            **self._common(4),
        )
        return out

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, 2N]` to `silu(gate) * up` `[B, N]`."""
        rows, n = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        launch(gate_kernel, (rows, triton.cdiv(n, 1024)), x, out, N=n, BLOCK=1024, **self._common(4))
        return out

    def _common(self, warps: int) -> dict[str, Any]:
        return {"num_warps": warps} | launch_options(self.pdl)

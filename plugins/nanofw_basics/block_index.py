"""Published blocks, found by their content: a hash table with chains, in arrays."""

from __future__ import annotations

from array import array

import numpy as np

from nanofw.batch import NULL_BLOCK

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]


class BlockIndex:
    """Finds a block by what it holds: its tokens, and all tokens before them.

    Each published block gets a *serial* number that is never used again, and is filed under the serial of the block
    before it and its own tokens. Both are compared when it is looked for, so a collision of hashes does no harm, and a
    block whose predecessor was forgotten is never found by mistake. 28 to 32 bytes a block, beside its token ids.

    Args:
        num_blocks: blocks in the pool, the null block included. block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._width = 4 * block_size
        self._tokens = bytearray(num_blocks * self._width)
        self._serial, self._parent = (array("q", bytes(8 * num_blocks)) for _ in range(2))
        self._chain = array("i", bytes(4 * num_blocks))
        self._buckets = array("i", bytes(4 << (num_blocks - 1).bit_length()))
        self._added = 0

    def find(self, parent: int, tokens: Tokens) -> int:
        """The block that holds `tokens` after the block of serial `parent` (0: at the beginning), or the null block."""
        content = tokens.tobytes()
        return self._find(self._bucket(parent, content), parent, content)

    def serial(self, block: int) -> int:
        """The serial of a published block, 0 of any other."""
        return self._serial[block]

    def publish(self, block: int, parent: int, tokens: Tokens) -> int:
        """Publish a block, unless it is, or there is one of this content. Returns the serial of the published one.

        A fork comes by blocks of its source that are published already, perhaps after a block that was forgotten since.
        """
        if serial := self._serial[block]:
            return serial
        content = tokens.tobytes()
        bucket = self._bucket(parent, content)
        if found := self._find(bucket, parent, content):
            return self._serial[found]
        self._added += 1
        self._tokens[block * self._width : (block + 1) * self._width] = content
        self._parent[block] = parent
        self._serial[block] = self._added  # last: a call that breaks off here leaves it published whole, or not at all
        self._link(bucket, block)
        return self._added

    def drop(self, block: int) -> None:
        """Forget a block, if it is published."""
        if not self._serial[block]:
            return
        self._serial[block] = 0
        bucket = self._bucket(self._parent[block], self._content(block))
        at = self._buckets[bucket]
        if at == block:
            self._buckets[bucket] = self._chain[block]
            return
        while self._chain[at] != block:
            at = self._chain[at]
        self._chain[at] = self._chain[block]

    def clear(self) -> None:
        """Forget all."""
        self._serials()[:] = 0
        self._heads()[:] = NULL_BLOCK

    def rebuild(self) -> Blocks:
        """Chain anew what is published, whatever an interrupted call has left of the chains.

        Returns:
            All blocks, in the order in which they should be used again: first those that are not published, then the
            newest before those it stands on.
        """
        self._heads()[:] = NULL_BLOCK
        order = np.argsort(-self._serials()[1:], kind="stable") + 1
        count = int(np.count_nonzero(self._serials()))
        for block in order[:count].tolist():
            self._link(self._bucket(self._parent[block], self._content(block)), block)
        return np.roll(order, -count)

    def check_integrity(self) -> None:
        """Each published block is in one chain, once, and found under its content; no other block is in any."""
        published = self._serials().nonzero()[0].tolist()
        chained: list[int] = []
        for block in filter(None, self._buckets):
            at = block
            while at != NULL_BLOCK and len(chained) <= len(published):
                chained.append(at)
                at = self._chain[at]
        assert sorted(chained) == published, f"blocks {sorted(chained)} are chained, and {published} are published"
        for block in published:
            parent, content = self._parent[block], self._content(block)
            found = self._find(self._bucket(parent, content), parent, content)
            assert found == block, f"block {block} is published, and {found} is found in its place"

    def _find(self, bucket: int, parent: int, content: bytes) -> int:
        block = self._buckets[bucket]
        while block != NULL_BLOCK:
            if self._parent[block] == parent and self._content(block) == content:
                return block
            block = self._chain[block]
        return NULL_BLOCK

    def _content(self, block: int) -> bytes:
        return bytes(self._tokens[block * self._width : (block + 1) * self._width])

    def _bucket(self, parent: int, content: bytes) -> int:
        return hash((parent, content)) & (len(self._buckets) - 1)

    def _link(self, bucket: int, block: int) -> None:
        self._chain[block], self._buckets[bucket] = self._buckets[bucket], block

    def _serials(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._serial, dtype=np.int64)

    def _heads(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(self._buckets, dtype=np.int32)

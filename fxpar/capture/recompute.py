"""Activation checkpointing in a forward: which blocks are to be run again in backward.

In: calls of ``torch.utils.checkpoint`` met while recording (what they run is recorded as if they were not there). Out:
the paths of the blocks that they cover, which the runtime checkpoints again, and a note about what else they cover.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxpar.capture.frame import Frame


class Recompute:
    """The checkpoint regions of one capture.

    ``paths`` maps the path of a block to ``"around"`` if its call stands in a region, ``"within"`` if a region in its
    own forward covers all of it (then a class that checkpoints its instances may do so again by itself).
    """

    def __init__(self) -> None:
        self.depth = 0
        self.paths: dict[str, str] = {}
        self._regions: list[tuple[Frame, int, int]] = []

    @contextmanager
    def region(self, frame: Frame) -> Iterator[None]:
        """A checkpointed function runs in here, and is recorded into ``frame``."""
        start = len(frame.nodes)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self._regions.append((frame, start, len(frame.nodes)))

    def covers(self, frame: Frame) -> bool:
        """Whether one region covers all of a block's ``frame``."""
        return (0, len(frame.nodes)) in {(start, end) for of, start, end in self._regions if of is frame}

    def called(self, path: str, covered: bool) -> None:
        """The block at ``path`` is called here; ``covered``: a region in its own forward covers all of it."""
        if self.depth:
            self.paths[path] = "around"
        elif covered:
            self.paths.setdefault(path, "within")

    def note(self) -> str:
        """What to tell about regions that do more than call blocks; empty if there is none."""
        for frame, start, end in self._regions:
            if not self.covers(frame) or not frame.prefix:
                for node in frame.nodes[start:end]:
                    if not node.op.startswith("block:"):
                        return (
                            f"activation checkpointing covers operations outside of blocks (in "
                            f"{frame.prefix}{node.module or 'the model'} at {node.source}): they are not run again, "
                            "their activations are kept"
                        )
        return ""

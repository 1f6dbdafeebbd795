"""Random numbers that agree where ranks compute the same thing, and differ where they compute different pieces.

In: torch's default generators. Out: the same, with another state for a while. During a parallel model's forward all
ranks draw from one :class:`SharedStream`, so an operation that every rank runs whole drops the same elements
everywhere; a split operation draws inside :func:`split_stream`. Activation checkpointing needs no help: it puts back
the default generators' state, which is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEEDS = 2**62


class SharedStream:
    """A stream of random numbers, equal on all ranks that made it from the same ``seed`` and used it alike."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        with _kept(device):
            _seed(seed, device)
            self.states = _states(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Draw from this stream; afterwards torch's own stream goes on where it was.

        >>> stream = SharedStream(7, torch.device("cpu"))
        >>> with stream.current():
        ...     first = torch.rand(2)
        >>> with stream.current():
        ...     bool((torch.rand(2) == first).any())
        False
        """
        with _kept(self.device):
            _restore(self.states, self.device)
            try:
                yield
            finally:
                self.states = _states(self.device)


@contextmanager
def split_stream(rank: int) -> Iterator[None]:
    """Draw numbers of this ``rank``'s own; afterwards the common stream goes on, one draw later, on every rank.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with split_stream(0):
    ...     a = torch.rand(1)
    >>> common = torch.rand(1)
    >>> _ = torch.manual_seed(0)
    >>> with split_stream(1):
    ...     b = torch.rand(1)
    >>> bool(a == b), bool(torch.rand(1) == common)
    (False, True)
    """
    device = torch.device("cuda") if torch.cuda.is_initialized() else torch.device("cpu")
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    with _kept(device):
        _seed(_mixed(seed, rank), device)
        yield


def _mixed(seed: int, rank: int) -> int:
    """A seed per rank, far apart for neighbouring ranks (the finaliser of SplitMix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) % _SEEDS


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _restore(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextmanager
def _kept(device: torch.device) -> Iterator[None]:
    states = _states(device)
    try:
        yield
    finally:
        _restore(states, device)

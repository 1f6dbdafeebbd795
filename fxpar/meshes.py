"""Meshes of processes: their axes by name, and whether they can be used.

In: a :class:`DeviceMesh`, or axes by name. Out: a :class:`~fxpar.layout.Mesh`, or a :class:`LayoutError`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpar.errors import LayoutError
from fxpar.layout import Mesh

MOST_AXES = 3


def as_mesh(mesh: DeviceMesh | Mesh | Mapping[str, int]) -> Mesh:
    """The mesh as names and degrees; raises :class:`LayoutError` if it has more than three axes."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
        found = Mesh(tuple(zip(names, mesh.shape, strict=True)))
    else:
        found = mesh if isinstance(mesh, Mesh) else Mesh.of(dict(mesh))
    if len(found.axes) > MOST_AXES:
        raise LayoutError(
            f"the mesh has axes {', '.join(found.names)}; fxpar splits over {MOST_AXES} at most: pass a sub-mesh such "
            f"as mesh[{', '.join(map(repr, found.names[-MOST_AXES:]))}], or fewer and longer axes"
        )
    return found


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise :class:`LayoutError` unless ``mesh`` is a DeviceMesh that this rank is part of."""
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"parallelize needs a DeviceMesh, not {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh, or use fxpar.plan to plan without processes"
        )
    if mesh.get_coordinate() is None:
        raise LayoutError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh}; call parallelize only on the ranks of the mesh "
            "(those whose mesh.get_coordinate() is not None)"
        )
    for axis in range(mesh.ndim):
        if not bool((mesh.mesh.diff(dim=axis) > 0).all()):
            raise LayoutError(
                f"the ranks of the mesh do not ascend along axis {axis}: {mesh.mesh.tolist()}; a process group knows "
                "its ranks in ascending order only, so pieces would be mixed up"
            )

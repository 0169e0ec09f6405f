"""GPUs that CUDA shows to a process, by the value of ``CUDA_VISIBLE_DEVICES``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as the driver lists it.

    Args:
        uuid: ``GPU-...``, empty if the driver does not say.
        slices: the UUIDs of its MIG slices; a GPU that has some is used by these alone.
    """

    uuid: str
    slices: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids by which it can be used."""
        return self.slices or ((self.uuid,) if self.uuid else ())


def visible(gpus: Sequence[Gpu], named: str | None) -> list[str]:
    """The UUIDs of the GPUs and slices that CUDA may use.

    Args:
        gpus: of the host, in the driver's order, which is that of ``nvidia-smi``.
        named: the value of ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or their beginnings, with
            commas; None if it is not set. As for CUDA, what stands behind a part that names
            nothing does not count, so that ``-1`` and an empty value show nothing.

    Example:
        >>> gpus = [Gpu(uuid="GPU-a1"), Gpu(uuid="GPU-b2"), Gpu(uuid="GPU-c3")]
        >>> visible(gpus, "2,GPU-a,-1,1")
        ['GPU-c3', 'GPU-a1']
    """
    if named is None:
        return [id_ for gpu in gpus for id_ in gpu.ids]
    found: dict[str, None] = {}
    for part in named.split(","):
        ids = _meant(gpus, part.strip())
        if ids is None:
            break
        found.update(dict.fromkeys(ids))
    return list(found)


def _meant(gpus: Sequence[Gpu], part: str) -> tuple[str, ...] | None:
    """Ids that one part names, None if it names none, or could be several."""
    if part.isascii() and part.isdigit():
        # Python reads no number of many thousand digits.
        index = int(part) if len(part) < 10 else len(gpus)
        return gpus[index].ids if index < len(gpus) else None
    if part.startswith("GPU-"):
        like = [gpu.ids for gpu in gpus if gpu.uuid.startswith(part)]
    elif part.startswith("MIG-"):
        like = [(each,) for gpu in gpus for each in gpu.slices if each.startswith(part)]
    else:
        return None
    return like[0] if len(like) == 1 else None

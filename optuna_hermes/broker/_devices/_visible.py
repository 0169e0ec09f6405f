"""GPUs that CUDA shows to a process, by the value of ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as the driver lists it: its UUID, empty if the driver does not say, and MIG slices."""

    uuid: str
    slices: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids by which it can be used."""
        # CUDA does not run on a whole GPU that is cut into slices.
        return self.slices or ((self.uuid,) if self.uuid else ())


def visible(gpus: Sequence[Gpu], named: str | None) -> list[str]:
    """The UUIDs of the GPUs and slices that CUDA may use.

    Args:
        gpus: of the host, in the driver's order, which is that of ``nvidia-smi``.
        named: the value of ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or their beginnings, with
            commas; None if it is not set.

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
            # As for CUDA, what stands behind a part that names nothing does not count: so -1 and
            # an empty value show nothing.
            break
        found.update(dict.fromkeys(ids))
    return list(found)


def is_gpu(device_id: str) -> bool:
    """True for an NVIDIA GPU, or a slice of one."""
    return device_id.startswith(("GPU-", "MIG-"))


def environment(shown: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Environment variables that show a process the devices of ``Grant.shown`` and no others."""
    # They work only if they are set before the process initialises its accelerator.
    names: dict[str, list[str]] = {}
    for variable, name in shown:
        names.setdefault(variable, []).append(name)
    # With an empty value ROCm and Level Zero show all, and with what names no device none.
    found = {each: ",".join(its) or "-1" for each, its in names.items()}
    if not any(map(any, names.values())):  # a CPU slot
        found[VISIBLE_VARIABLE] = ""
    return found


def hidden(device_ids: Iterable[str]) -> bool:
    """True if ``CUDA_VISIBLE_DEVICES`` shows this process none of these GPUs."""
    gpus = {id_ for id_ in device_ids if is_gpu(id_)}
    named = os.environ.get(VISIBLE_VARIABLE)
    if not gpus or named is None:
        return False
    from optuna_hermes.broker._devices import _nvml as nvml  # which needs this module

    with nvml.driver() as binding:
        return gpus.isdisjoint(visible(list(nvml.gpus(binding)), named))


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

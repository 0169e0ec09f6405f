"""Statuses of brokers that tests need only a part of: the rest is as of an idle broker."""

from __future__ import annotations

from typing import Any

import msgspec

from optuna_hermes.broker._protocol import BrokerStatus, DeviceStatus, StudyStatus

_HOLDER: dict[str, Any] = {
    "key": "s",
    "study": "s",
    "trial": None,
    "state": "running",
    "pid": 1,
    "epoch": 1,
    "since_seconds": 0.0,
    "left_seconds": 0.0,
    "slice_seconds": 1.0,
}
_DEVICE: dict[str, Any] = {
    "id": "cpu:0",
    "kind": "cpu",
    "healthy": True,
    "memory_bytes": None,
    "memory_free_bytes": None,
    "power": "on",
    "power_watts": None,
    "energy_joules": None,
    "holder": None,
    "problem": "",
}
_TRIAL: dict[str, Any] = {
    "state": "stored",
    "override": None,
    "tier": None,
    "held_bytes": None,
    "host_bytes": 0,
    "device": None,
    "units": 0,
    "units_trained": 0,
    "value": None,
    "slices": 0,
    "suspensions": 0,
    "device_seconds": 0.0,
    "watt_hours": None,
}
_COUNTS = dict.fromkeys(("pending", "running", "parked", "stored", "done", "failed"), 0)
_STUDY: dict[str, Any] = {
    "key": "s",
    "name": "s",
    "policy": "hermes",
    "maximize": False,
    "policy_folders": [],
    "driver_pid": None,
    "draining": False,
    "problem": None,
    "outage_seconds": None,
    "outage_reason": "",
    "held": [],
    "boosted": [],
    "finishing": [],
    "all_held": False,
    "no_room": [],
    "finished": False,
    "unstarted": 0,
    "workers": {"alive": 0, "idle": 0},
    "counts": _COUNTS,
    "lost": [],
    "failures": {"first": None, "error": "", "alike": 0, "hopeless": False},
    "device_seconds": 0.0,
    "watt_hours": None,
    "held_seconds": 0.0,
    "spent_seconds": 0.0,
    "overhead_seconds": {
        "idle": 0.0,
        "opening": 0.0,
        "resuming": 0.0,
        "saving": 0.0,
        "suspending": 0.0,
    },
    "switches": 0,
    "best": None,
    "trials": [],
}


def device_status(**fields: Any) -> DeviceStatus:
    """A device that is free; ``holder`` is the part of a lease that matters."""
    if fields.get("holder") is not None:
        fields["holder"] = _HOLDER | fields["holder"]
    return msgspec.convert(_DEVICE | fields, DeviceStatus)


def study_status(**fields: Any) -> StudyStatus:
    """A study without trials; ``counts`` and ``trials`` are the parts of them that matter."""
    fields["counts"] = _COUNTS | fields.get("counts", {})
    fields["trials"] = [_TRIAL | each for each in fields.get("trials", [])]
    return msgspec.convert(_STUDY | fields, StudyStatus)


def broker_status(*studies: StudyStatus, devices: list[DeviceStatus] | None = None) -> BrokerStatus:
    """A broker of the host ``box`` that serves these studies."""
    return msgspec.convert(
        {
            "host": "box",
            "host_memory": {"used_bytes": 0, "budget_bytes": 0},
            "recovering": [],
            "devices": msgspec.to_builtins(devices or []),
            "studies": msgspec.to_builtins(studies),
        },
        BrokerStatus,
    )

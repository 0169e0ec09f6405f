"""Lists of devices of other makers, and what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker._devices._source import Devices, absolute, parse_devices
from optuna_hermes.errors import DeviceSpecError


def write(folder: Path, *devices: dict[str, Any], **more: Any) -> str:
    path = folder / "devices.json"
    path.write_text(
        json.dumps({"variable": "HIP_VISIBLE_DEVICES", "devices": list(devices)} | more)
    )
    return str(path)


def refusal(spec: str) -> str:
    with pytest.raises(DeviceSpecError) as caught:
        parse_devices(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


FIRST = {"id": "amd-0", "shown_as": "0"}
SECOND = {"id": "amd-1", "shown_as": "1"}


def test_listed_devices_stand_beside_others(tmp_path: Path) -> None:
    """They keep their order, and are GPUs to the broker: their processes stay on them."""
    spec = f"cpu:1, {write(tmp_path, SECOND, FIRST)}"
    slots = parse_devices(spec)
    assert [slot.id for slot in slots] == ["cpu:0", "amd-1", "amd-0"]
    polled = Devices(slots, "here").poll().devices
    assert [(each.id, each.kind, each.shown_by) for each in polled] == [
        ("cpu:0", "cpu", None),
        ("amd-1", "gpu", ("HIP_VISIBLE_DEVICES", "1")),
        ("amd-0", "gpu", ("HIP_VISIBLE_DEVICES", "0")),
    ]


def test_a_list_that_changes_counts_as_it_was_read(tmp_path: Path) -> None:
    """The next broker reads it again."""
    slots = parse_devices(write(tmp_path, FIRST, SECOND))
    write(tmp_path, SECOND)
    assert [each.id for each in Devices(slots).poll().devices] == ["amd-0", "amd-1"]


def test_memory_that_is_not_listed_is_unknown(tmp_path: Path) -> None:
    """Trials are believed where the driver says nothing of the memory in use."""
    spec = write(tmp_path, FIRST | {"memory_bytes": 100}, SECOND)
    first, second = Devices(parse_devices(spec)).poll().devices
    assert (first.memory_bytes, first.memory_free_bytes) == (100, None)
    assert (second.memory_bytes, second.memory_free_bytes) == (None, None)


def test_what_a_driver_writes_must_be_a_number(tmp_path: Path) -> None:
    """Anything else is not taken for memory that is free; after some seconds it counts as lost."""
    used = tmp_path / "used"
    used.write_text("many")
    listed = FIRST | {"memory_bytes": 100, "used_bytes_file": str(used)}
    source = Devices(parse_devices(write(tmp_path, listed)))
    (device,) = source.poll().devices
    assert (device.free, device.lost) == (False, False)
    assert device.problem == (
        "it cannot be read (invalid literal for int() with base 10: 'many'): see whether its "
        "driver runs"
    )
    used.write_text("30")
    (device,) = source.poll().devices
    assert (device.free, device.memory_free_bytes, device.problem) == (True, 70, "")


def test_a_listed_device_that_is_back_is_not_lost_any_more(tmp_path: Path) -> None:
    """Its driver was started again: what is odd later begins anew."""
    used = tmp_path / "used"
    listed = FIRST | {"memory_bytes": 100, "used_bytes_file": str(used)}
    source = Devices(parse_devices(write(tmp_path, listed)))
    lost = []
    for text in (None, "30", "many"):
        if text is not None:
            used.write_text(text)
        lost.append(source.poll().devices[0].lost)
    assert lost == [True, False, False]


def test_a_path_is_made_absolute_for_the_broker() -> None:
    """Its folder is another one; nothing else of the text changes its meaning."""
    here = os.getcwd()
    assert absolute("cpu:2, amd.json,GPU-a") == f"cpu:2,{here}/amd.json,GPU-a"
    assert absolute("auto") == "auto"


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The message shows what such a list looks like, so that it can be written at once."""
    path = tmp_path / "amd.json"
    assert refusal(str(path)) == (
        f"--devices names a list of devices that cannot be read (No such file or directory): "
        f"{str(path)!r}; write {EXAMPLE} there, or name another file."
    )


EXAMPLE = '{"variable": "HIP_VISIBLE_DEVICES", "devices": [{"id": "amd-0", "shown_as": "0"}]}'


@pytest.mark.parametrize(
    ("devices", "more", "reason"),
    [
        ([], {}, "Expected `array` of length >= 1"),
        ([{"id": "amd-0"}], {}, "Object missing required field `shown_as`"),
        ([FIRST | {"memory": 1}], {}, "Object contains unknown field `memory`"),
        ([FIRST | {"memory_bytes": -1}], {}, "Expected `int` >= 0"),
        ([FIRST], {"variable": "A B"}, "Expected `str` matching regex"),
        ([FIRST | {"id": "GPU-0"}], {}, "'GPU-0' is no id"),
        ([FIRST | {"id": "a,b"}], {}, "'a,b' is no id"),
        ([FIRST, SECOND | {"id": "amd-0"}], {}, "the id 'amd-0' is there twice"),
        ([FIRST, SECOND | {"shown_as": "0"}], {}, "two devices are shown as '0'"),
        (
            [FIRST | {"used_bytes_file": "/used"}],
            {},
            "'amd-0' has a used_bytes_file but no memory_bytes",
        ),
        (
            [FIRST | {"used_bytes_file": "used", "memory_bytes": 1}],
            {},
            "the used_bytes_file of 'amd-0' is no absolute path",
        ),
    ],
)
def test_a_list_that_is_none_is_refused(
    tmp_path: Path, devices: list[dict[str, Any]], more: dict[str, Any], reason: str
) -> None:
    """The reason is named in one line, after an example of how it must be."""
    spec = write(tmp_path, *devices, **more)
    message = refusal(spec)
    assert message.startswith(f"{spec!r} must list devices as {EXAMPLE} does, but {reason}")
    assert message.endswith(": mend it.")


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """As any other fault of the list."""
    path = tmp_path / "devices.json"
    path.write_text("amd-0")
    assert "but JSON is malformed" in refusal(str(path))

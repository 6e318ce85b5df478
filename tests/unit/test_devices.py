"""Which GPUs there are for the runs, asked without torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfscale import devices
from halfscale.devices import Board, Gpu, GpuError, NoDriverError, read_mask
from pretended import boards, uuid

Install = Callable[[list[dict[str, Any]]], None]

SMALL = {"model": "Small", "memory": 1 << 30}
LARGE = {"model": "Large", "memory": 1 << 34}
DIVIDED: dict[str, Any] = {
    "uuid": uuid(9),
    "model": "Large",
    "instances": [
        {"uuid": uuid(number, "MIG"), "model": "Large MIG 1g.5gb", "gi": number + 7, "ci": 0}
        for number in range(2)
    ],
}
PLACES = [f"MIG-{uuid(9)}/{number + 7}/0" for number in range(2)]


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cu130")


@pytest.fixture(autouse=True)
def install(pretended_driver: Install) -> Install:
    """Install GPUs; a test that does not has no driver."""
    return pretended_driver


def seen(monkeypatch: pytest.MonkeyPatch, mask: str | None = None) -> list[str]:
    """What is visible under a mask, held against the count."""
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    found = [gpu.uuid for gpu in devices.visible_gpus()]
    assert devices.count_gpus() == len(found)
    return found


@pytest.mark.parametrize("count", [0, 1, 8])
def test_without_a_mask_all_of_one_model_are_visible(
    install: Install, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    install(boards(count))
    assert seen(monkeypatch) == [uuid(number) for number in range(count)]


def test_of_several_models_that_with_the_most_memory_is_visible(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install([a | b for a, b in zip(boards(4), [SMALL, LARGE] * 2, strict=True)])
    assert seen(monkeypatch) == [uuid(1), uuid(3)]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        ("2", [2]),
        ("3,0", [3, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0,2,-1,1", [0, 2]),
        ("1,4,2", [1]),
        ("4", []),
        ("1,,2", [1]),
        ("1x,2", [1, 2]),
        ("1,GPU-2", [1]),
        (uuid(2), [2]),
        ("GPU-3,GPU-10", [3, 1]),
        ("GPU-3,1", [3]),
        ("GPU-3,GPU-f,GPU-1", [3]),
        ("GPU-", []),
        ("gpu-3", []),
        ("MIG-3", []),
    ],
)
def test_a_mask_is_read_up_to_the_first_entry_that_names_no_gpu(
    install: Install, monkeypatch: pytest.MonkeyPatch, mask: str, visible: list[int]
) -> None:
    install(boards(4))
    assert seen(monkeypatch, mask) == [uuid(number) for number in visible]


@pytest.mark.parametrize(
    ("mask", "once"),
    [
        ("0,0", uuid(0)),
        ("1,01", uuid(1)),
        ("GPU-1,GPU-10", uuid(1)),
        (f"{uuid(2)},{uuid(1)},{uuid(2)}", f"{uuid(2)},{uuid(1)}"),
    ],
)
def test_a_gpu_named_twice_is_refused_with_what_to_write(
    install: Install, monkeypatch: pytest.MonkeyPatch, mask: str, once: str
) -> None:
    install(boards(4))
    with pytest.raises(GpuError, match=rf"={mask} names a GPU twice; write \S+={once}$"):
        seen(monkeypatch, mask)
    with pytest.raises(GpuError):
        devices.count_gpus()
    assert seen(monkeypatch, once)


def test_an_index_among_several_models_must_say_whose_it_is(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install([a | b for a, b in zip(boards(2), [SMALL, LARGE], strict=True)])
    with pytest.raises(GpuError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        seen(monkeypatch, "0")
    assert seen(monkeypatch, uuid(0)) == [uuid(0)]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert seen(monkeypatch, "0") == [uuid(0)]
    assert seen(monkeypatch, "1,0") == [uuid(1), uuid(0)]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [0, 1]),
        ("0", [0, 1]),
        ("GPU-9", [0, 1]),
        (uuid(1, "MIG"), [1]),
        ("MIG-1,MIG-0", [1, 0]),
        (PLACES[1], [1]),
        (f"{PLACES[1]},{uuid(0, 'MIG')}", [1, 0]),
        ("MIG-GPU-9/8/0", [1]),
        ("MIG-GPU-9/3/0", []),
        ("MIG-7", []),
        ("MIG-", []),
    ],
)
def test_a_divided_gpu_stands_for_its_instances(
    install: Install, monkeypatch: pytest.MonkeyPatch, mask: str | None, visible: list[int]
) -> None:
    install([DIVIDED])
    assert seen(monkeypatch, mask) == [uuid(number, "MIG") for number in visible]


def sized(*sizes: int) -> list[dict[str, Any]]:
    """Instances of so many GB each."""
    return [
        {
            "uuid": uuid(n, "MIG"),
            "model": f"Large MIG {size}gb",
            "memory": size << 30,
            "gi": n,
            "ci": 0,
        }
        for n, size in enumerate(sizes)
    ]


def test_one_gpu_with_instances_of_several_sizes_is_one_model(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install([{"uuid": uuid(9), **LARGE, "instances": sized(5, 20, 5)}])
    assert seen(monkeypatch) == [uuid(1, "MIG")], "they round differently: the largest alone"
    assert seen(monkeypatch, "0") == [uuid(n, "MIG") for n in range(3)]


def test_an_index_is_not_ambiguous_where_one_of_two_alike_is_divided(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install([{"uuid": uuid(9), **LARGE, "instances": sized(5)}, {"uuid": uuid(8), **LARGE}])
    assert seen(monkeypatch, "1") == [uuid(8)]


def test_one_instance_under_two_names_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install([DIVIDED])
    with pytest.raises(GpuError, match="names a GPU twice"):
        seen(monkeypatch, f"{uuid(1, 'MIG')},{PLACES[1]}")


def test_an_instance_that_the_driver_does_not_tell_is_believed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = ["nvmlDeviceGetMigDeviceHandleByIndex"]
    install([{"uuid": uuid(9), "instances": [], "refuses": refuses}])
    assert seen(monkeypatch, PLACES[0]) == [PLACES[0]]
    assert seen(monkeypatch, "0") == []


def test_a_gpu_that_does_not_answer_keeps_its_index(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = boards(3)
    gpus[1]["refuses"] = ["nvmlDeviceGetHandleByIndex"]
    install(gpus)
    assert seen(monkeypatch) == [uuid(0), uuid(2)]
    assert seen(monkeypatch, "2") == [uuid(2)]
    assert seen(monkeypatch, "1") == []


@pytest.mark.parametrize("refused", ["nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_tells_little_is_enough(
    install: Install, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    install(boards(2, refuses=[refused]))
    assert seen(monkeypatch) == [uuid(0), uuid(1)]


def test_without_a_driver_there_is_none() -> None:
    assert devices.count_gpus() == 0
    with pytest.raises(NoDriverError, match="write device: cpu"):
        devices.visible_gpus()


def test_a_driver_that_fails_is_none(install: Install) -> None:
    install(boards(2, refuses=["nvmlDeviceGetCount"]))
    assert devices.count_gpus() == 0


def test_a_torch_build_without_cuda_can_use_none(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(boards(1))
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cpu")
    assert devices.count_gpus() == 0


def test_without_torch_there_is_none(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    install(boards(1))
    monkeypatch.setattr(devices, "version", missing)
    assert devices.count_gpus() == 0


LISTED = [Board(uuid(n), (Gpu(uuid(n)),)) for n in range(4)]
ENTRIES = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["", "+1", "1x", "x", "2 ", "007"]),
    st.tuples(st.integers(0, 5), st.integers(4, 40)).map(lambda pair: uuid(pair[0])[: pair[1]]),
    st.just("MIG-0"),
)


def torch_sees(mask: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's own reading of a mask makes visible of `LISTED`; nothing for one named twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    uuids = [board.uuid for board in LISTED]
    entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        entries = torch.cuda._transform_uuid_to_ordinals(entries, uuids)
    found = []
    for index in entries:
        if index >= len(uuids):
            break
        found.append(uuids[index])
    return found


@given(entries=st.lists(ENTRIES, max_size=6))
def test_a_mask_is_read_as_torch_reads_it(entries: list[str]) -> None:
    mask = ",".join(entries)
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = torch_sees(mask, monkeypatch)
    try:
        found = [gpu.uuid for gpu in read_mask(mask, LISTED, bus_order=True)]
    except GpuError:
        found = []
    assert found == expected


@given(mask=st.text(alphabet=st.sampled_from("0123-,/ GPUMIGabc."), max_size=40))
def test_what_is_visible_is_listed_and_never_twice(mask: str) -> None:
    try:
        found = read_mask(mask, LISTED, bus_order=True)
    except GpuError as error:
        assert "\n" not in str(error)
        return
    listed = [gpu for board in LISTED for gpu in board.gpus]
    assert len(set(found)) == len(found)
    assert set(found) <= set(listed)
    again = ",".join(gpu.uuid for gpu in found)
    assert read_mask(again, LISTED, bus_order=True) == found

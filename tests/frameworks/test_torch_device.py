"""Pixels on a device: a fake one, whose copies are made as late as may be, and a real one if there is one."""

import ctypes
import gc

import pytest
import torch
from tests.plane.test_images import KINDS, picture

import headrace as hr
from headrace.frameworks.torch import device as devices
from headrace.torch import DataLoader, Dataset

COUNT = 60


class LateTransfer:
    """A fake: bytes leave the host when somebody waits for them, or takes what came of them."""

    def __init__(self, device, host, labels, finish):
        self.device = device
        address, nbytes, shape = host.data_ptr(), host.nbytes, host.shape

        def run():
            memory = (ctypes.c_uint8 * nbytes).from_address(
                address
            )  # as for CUDA, nothing keeps it
            copy = torch.tensor(bytearray(memory), dtype=torch.uint8)
            return [finish(copy.view(shape)), labels.clone()]

        self.run = run
        self.tensors = None

    @property
    def copied(self):
        return self.tensors is not None

    def wait(self):
        if self.tensors is None:
            self.tensors, self.run = self.run(), None

    def take(self):
        self.device.taken += 1
        if not self.device.lazy:
            self.wait()
            return self.tensors
        self.device.under_way.append(self)
        return self  # a kernel would wait for it; here the test does


class FakeDevice:
    """No hardware: notes what is locked, and refuses what CUDA would."""

    refuses = lazy = False

    def __init__(self, place):
        self.place = place
        self.locked = {}
        self.ever = []
        self.taken = 0
        self.under_way = []
        FakeDevice.latest = self

    def lock(self, address, nbytes):
        assert address not in self.locked, "CUDA refuses memory that is registered already"
        assert address % 4096 == 0
        if self.refuses:
            return False
        self.locked[address] = nbytes
        self.ever.append(address)
        return True

    def unlock(self, address):
        del self.locked[address]

    def send(self, host, labels, finish):
        if not self.refuses and host.nbytes:
            assert self.locked.get(host.data_ptr(), 0) >= host.nbytes
        return LateTransfer(self, host, labels, finish)


@pytest.fixture(scope="module")
def photo_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device") / "photos.hr"
    kinds = [KINDS["jpeg 4:2:0"], KINDS["png"]]
    hr.pack(
        ((f"{i:02d}", kinds[i % 2](picture(90 + i, 70, i)), i % 5) for i in range(COUNT)), folder
    )
    return folder


@pytest.fixture(
    params=["fake", pytest.param("cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch finds no CUDA here"))]
)  # fmt: skip
def device(request, monkeypatch):
    if request.param == "fake":
        monkeypatch.setattr(devices, "CudaDevice", FakeDevice)
    return request.param


def loaded(store, images, **options):
    with DataLoader(store, 8, shuffle=True, seed=3, decode=images, **options) as loader:
        return [
            (pixels.cpu().clone(), labels.cpu().clone())
            for _ in range(2)
            for pixels, labels in loader
        ]


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_device_gets_what_the_processor_would_make(photo_store, device, dtype, layout):
    usual = {} if dtype == "uint8" else {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}
    images = hr.Images(size=(24, 40), flip=True, dtype=dtype, layout=layout, **usual)
    here, there = loaded(photo_store, images), loaded(photo_store, images, device="cuda")
    assert len(here) == len(there) == 2 * -(-COUNT // 8)
    for (pixels, labels), (sent, sent_labels) in zip(here, there, strict=True):
        assert (sent.dtype, sent.shape, sent.stride()) == (
            pixels.dtype,
            pixels.shape,
            pixels.stride(),
        )
        assert torch.equal(labels, sent_labels)
        if dtype == "uint8":
            assert torch.equal(pixels, sent)
        else:  # sums in another order: the last digit of the type
            digit = torch.finfo(pixels.dtype).eps
            torch.testing.assert_close(
                sent.double(), pixels.double(), rtol=2 * digit, atol=4 * digit
            )


def test_no_buffer_is_decoded_into_before_its_copy_is_complete(photo_store, monkeypatch):
    """The fake's copies are made last of all: what was overwritten meanwhile would be another batch's."""
    monkeypatch.setattr(devices, "CudaDevice", FakeDevice)
    monkeypatch.setattr(FakeDevice, "lazy", True)
    images = hr.Images(size=32)
    expected = loaded(photo_store, images)
    with DataLoader(photo_store, 8, shuffle=True, seed=3, decode=images, device="cuda") as loader:
        taken = [transfer for _ in range(2) for transfer in loader]
    for transfer, (pixels, _) in zip(taken, expected, strict=True):
        assert torch.equal(transfer.tensors[0], pixels)


def test_buffers_are_locked_once_and_unlocked_while_they_are_mapped(photo_store, monkeypatch):
    monkeypatch.setattr(devices, "CudaDevice", FakeDevice)
    images = hr.Images(size=64)
    loader = DataLoader(photo_store, 8, decode=images, device="cuda")
    for _ in range(3):
        list(loader)
    fake = FakeDevice.latest
    assert 1 <= len(fake.locked) == len(fake.ever) < 3 * len(loader)
    loader.close()
    assert fake.locked == {}
    assert [labels.tolist() for _, labels in loader] != []  # and used again, with another pool
    assert fake.locked
    iterator = iter(loader)
    next(iterator)  # left under way, and nobody closes it
    del loader, iterator
    gc.collect()
    assert fake.locked == {}


def test_where_memory_cannot_be_locked_it_is_said_once_and_copied_all_the_same(
    photo_store, monkeypatch, caplog
):
    monkeypatch.setattr(devices, "CudaDevice", FakeDevice)
    monkeypatch.setattr(FakeDevice, "refuses", True)
    images = hr.Images(size=16)
    here, there = loaded(photo_store, images), loaded(photo_store, images, device="cuda")
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(here, there, strict=True))
    (message,) = [r.getMessage() for r in caplog.records if "page-locked" in r.getMessage()]
    assert message.startswith("memory for batches cannot be page-locked (6144 bytes")


def test_pictures_that_are_left_out_leave_a_copy_that_is_not_locked(tmp_path, device):
    hr.pack(((f"{i}", KINDS["png"](picture(20, 20, i)) if i != 5 else b"none") for i in range(12)),
            tmp_path / "bad.hr")  # fmt: skip
    images = hr.Images(size=16)
    for options in ({}, {"device": "cuda"}):
        loader = DataLoader(tmp_path / "bad.hr", 4, decode=images, on_error="skip", **options)
        if options and device == "fake":
            FakeDevice.latest.refuses = True  # a copy is sent as it is
        assert [len(pixels) for pixels, _ in loader] == [4, 3, 4]
        loader.close()


def test_what_cannot_be_sent_is_refused(photo_store, monkeypatch):
    images = hr.Images(size=16)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch finds no CUDA"):
            DataLoader(photo_store, 8, decode=images, device="cuda")
    with pytest.raises(ValueError, match="expected 'cuda'"):
        DataLoader(photo_store, 8, decode=images, device="meta")
    monkeypatch.setattr(devices, "CudaDevice", FakeDevice)
    with pytest.raises(ValueError, match=r"decode is no headrace\.Images"):
        DataLoader(Dataset(photo_store), 8, device="cuda")
    with pytest.raises(ValueError, match="collate_fn is given"):
        DataLoader(photo_store, 8, decode=images, collate_fn=list, device="cuda")
    assert loaded(photo_store, images, device="cpu")[0][0].device.type == "cpu"

"""GPUs as NVML tells them: whole ones, ones that support little, ones that get lost, and none."""

from headrace.machine.sensors import GPU, RETRY_LOOKS, GPUs
from telemetry.fake_nvml import FakeNVML

BUSY = {"busy": 40, "memory": 5 << 30, "power": 250_000, "pids": [11, 12]}


def test_a_gpu_tells_what_it_does_and_for_whom():
    gpus = GPUs(lambda: FakeNVML(BUSY))
    assert gpus.read() == [
        GPU(
            index=0,
            busy=0.4,
            memory_bytes=5 << 30,
            memory_total_bytes=80 << 30,
            power_w=250.0,
            processes=(11, 12),
        )
    ]
    assert gpus.why == ""


def test_what_a_gpu_does_not_support_is_left_out_alone():
    sizes = GPU(index=0, memory_bytes=7, memory_total_bytes=80 << 30)
    assert GPUs(lambda: FakeNVML({"memory": 7})).read() == [sizes]
    odd = {"busy": True, "memory": -1, "pids": ["x", None, 3]}
    read = GPUs(lambda: FakeNVML(odd)).read()
    assert read == [GPU(index=0, memory_total_bytes=80 << 30, processes=(3,))]


def test_a_gpu_that_is_lost_is_left_out_until_it_is_back():
    nvml = FakeNVML(BUSY, BUSY)
    gpus = GPUs(lambda: nvml)
    assert [gpu.index for gpu in gpus.read()] == [0, 1]
    nvml.gpus[0] = None
    assert [gpu.index for gpu in gpus.read()] == [1]
    nvml.gpus[1] = None
    assert gpus.read() == []
    assert gpus.why == "no GPU answers any more"
    assert not nvml.up
    nvml.gpus = [BUSY, BUSY]
    counts = [len(gpus.read()) for _ in range(RETRY_LOOKS)]
    assert counts[0] == 0
    assert counts[-1] == 2


def test_without_the_library_or_the_driver_it_is_said_and_not_asked_all_the_time():
    asked = []

    def missing():
        asked.append(1)
        raise ImportError("pynvml")

    gpus = GPUs(missing)
    for _ in range(RETRY_LOOKS):
        assert gpus.read() == []
    assert len(asked) == 1
    assert "headrace[gpu]" in gpus.why
    nvml = FakeNVML(BUSY)
    nvml.refuses = "Driver Not Loaded"
    gpus = GPUs(lambda: nvml)
    assert gpus.read() == []
    assert "Driver Not Loaded" in gpus.why


def test_closing_lets_go_of_the_driver():
    nvml = FakeNVML(BUSY)
    gpus = GPUs(lambda: nvml)
    gpus.read()
    assert nvml.up
    gpus.close()
    assert not nvml.up

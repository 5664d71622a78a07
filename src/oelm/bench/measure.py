"""Timing: in windows of steps, round by round, every arm in every round.

A window holds the same texts for every arm (or a fifth of them, if all steps cost the same), so its time
gives an arm's texts and tokens per second, whatever its batches are. Arms alternate, every other round in
reverse order, so that warming up and disturbances of the machine affect all of them. A GPU at its power limit
is faster for a while after idling or lighter work, so an arm takes some untimed steps directly before each
window.
"""

import gc
import shutil
import statistics
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oelm.bench.load import Case, Load
from oelm.data.batches import Plan
from oelm.system.library_errors import first_line

QUIET = 10.0  # seconds between two lines on the progress of the rounds
LEAD_IN = 3  # a window's steps divided by this are taken untimed before it


@dataclass(frozen=True)
class Window:
    """The time and the work of one timed window; texts and tokens without padding."""

    seconds: float
    steps: int
    texts: int
    tokens: int
    operations: float
    clock_mhz: float | None = None  # of a GPU, and its power, if nvidia-smi reports them
    power_w: float | None = None


def held_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The bytes of the gradients, and of the optimizer's moments without its step counters."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return (
        sum(p.grad.nbytes for p in trained if p.grad is not None),
        sum(value.nbytes for value in moments if isinstance(value, Tensor) and value.dim()),
    )


class Arm(ABC):
    """Something that can be run repeatedly for a window of steps."""

    about: str  # a description
    model: nn.Module | None = None
    held: tuple[int, int] | None = None  # `held_bytes`
    untimed = 1  # windows before the first timed one
    cudnn_attention = True  # whether PyTorch may choose cuDNN's attention, as by default

    @abstractmethod
    def warm_up(self) -> None:
        """Take the first step, which compiles, tunes and makes the optimizer's state. Its memory peak is not
        counted."""

    @abstractmethod
    def window(self) -> Window: ...


class StepArm(Arm):
    """An arm that is a function of the step, called `steps` times for a window."""

    def __init__(self, device: torch.device, steps: int, load: Load, operations: float) -> None:
        self.device, self.steps, self.load, self.operations = device, steps, load, operations

    @abstractmethod
    def step(self, k: int) -> None:
        """Step k of the window."""

    def warm_up(self) -> None:
        self.step(0)

    def window(self) -> Window:
        for k in range(self.steps // LEAD_IN):
            self.step(k)
        start = now(self.device)
        for k in range(self.steps):
            self.step(k)
        seconds = now(self.device) - start
        return Window(seconds, self.steps, self.load.texts, self.load.tokens, self.operations)


class TrainingArm(StepArm):
    """A step arm with a model and an optimizer, whose held bytes are measured at the first step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, plan: Plan) -> None:
        # The same batches in every window, so that all shapes occur in the first one.
        self.batches, load, kind = plan.epoch(0), Load.of(plan.lengths), case.store.kind
        operations = load.operations(case.config, kind, causal=kind == "lm")
        super().__init__(case.device, len(self.batches), load, operations)

    def warm_up(self) -> None:
        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.held = held_bytes(optimizer)

        hook = self.optimizer.register_step_post_hook(count)
        self.step(0)
        hook.remove()


class Product(StepArm):
    """Matrix products alone, for the peak rate or for the work that freezing omits."""

    def __init__(self, about: str, factors: list[tuple[Tensor, Tensor]], steps: int) -> None:
        operations = sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in factors)
        super().__init__(factors[0][0].device, steps, Load(0, 0, 0), operations * steps)
        self.about, self.factors = about, factors

    def step(self, k: int) -> None:
        for a, b in self.factors:
            a @ b


def square_product(device: torch.device) -> Product:
    """A product of large square matrices in the precision of training, which gives the peak rate."""
    size, dtype, steps = (8192, torch.bfloat16, 20) if device.type == "cuda" else (1024, torch.float32, 3)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Product(f"{size} x {size} x {size}, {str(dtype).removeprefix('torch.')}", [(a, b)], steps)


def omitted_product(
    device: torch.device, layers: int, d_model: int, tokens: int, pooled: bool = True
) -> Product:
    """The products that freezing Q and K omits from a step: those of their weights' gradients. In the
    reference GPT's classifier (`pooled`) the last block has queries for the pooled tokens only, so there it
    is K's alone.
    """
    dtype, steps = (torch.bfloat16, 20) if device.type == "cuda" else (torch.float32, 3)
    # Each layer has its own factors, so that they are not in a cache, as in a real step.
    factors = []
    for width in [2 * d_model] * (layers - 1) + [d_model if pooled else 2 * d_model]:
        grad, x = (torch.randn(tokens, n, device=device, dtype=dtype) for n in (width, d_model))
        factors.append((grad.t(), x))
    return Product("the gradients of Q's and K's weights", factors, steps)


class GpuClock:
    """A context that samples a GPU's clock and power; without a GPU or nvidia-smi there are no samples.

    A large GPU under load reaches its power limit and lowers its clock, so two arms that differ in power
    differ in clock as well. These two numbers distinguish that from a difference in work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, float, float]] = []  # when, MHz, W
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "GpuClock":
        program = shutil.which("nvidia-smi")
        if self.device.type == "cuda" and program is not None:
            query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms=50"]
            command = [program, f"--id={gpu_name(self.device)}", *query]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self.thread = threading.Thread(target=self._read, args=[self.process.stdout], daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.thread.join()
            self.process.communicate()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            with suppress(ValueError):  # "[N/A]"
                clock, power = map(float, line.split(","))
                self.samples.append((time.perf_counter(), clock, power))

    def since(self, start: float) -> tuple[float | None, float | None]:
        """The median clock (MHz) and power (W) since `start`; None without samples."""
        recent = [sample[1:] for sample in list(self.samples) if sample[0] > start]
        if not recent:
            return None, None
        clocks, powers = zip(*recent, strict=True)
        return statistics.median(clocks), statistics.median(powers)


def gpu_name(device: torch.device) -> str:
    """The UUID of a GPU, for nvidia-smi: it numbers all GPUs, PyTorch only the visible ones."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass
class ArmMeasurement:
    """The measurements of an arm; `failed` is the reason if they are incomplete."""

    name: str
    about: str = ""
    failed: str | None = None
    windows: list[Window] = field(default_factory=list)
    held: tuple[int, int] | None = None
    peak_memory: int | None = None  # bytes above those allocated before it was made; None without a GPU
    parameters: int | None = None


def measure(
    makers: Mapping[str, Callable[[], Arm]],
    rounds: int,
    device: torch.device,
    time_left: Callable[[], bool],
    say: Callable[[str], None],
) -> dict[str, ArmMeasurement]:
    """Make every arm, warm it up, then time one window of each in every round.

    An arm that fails at any point is recorded with the reason, and the others go on without it.
    """
    measured = {name: ArmMeasurement(name) for name in makers}
    arms: dict[str, Arm] = {}
    if device.type == "cuda":
        _make_workspaces(device)
    for name, make in makers.items():
        if not time_left():
            measured[name].failed = "not run: the time was up"
            continue
        began = time.perf_counter()
        arm = _attempt(measured[name], partial(_warmed, measured[name], make, device))
        if arm is not None:
            arms[name] = arm
        say(f"  {name}: {measured[name].failed or f'ready after {time.perf_counter() - began:.1f} s'}")
        _release(device)  # so that the next arm's memory is measured alone
    gc.collect()
    gc.disable()  # collections would leave the device idle
    try:
        with GpuClock(device) as clock:
            _run_rounds(arms, measured, rounds, time_left, clock, say)
    finally:
        gc.enable()
    arms.clear()
    _release(device)
    return measured


def _run_rounds(
    arms: dict[str, Arm],
    measured: dict[str, ArmMeasurement],
    rounds: int,
    time_left: Callable[[], bool],
    gpu_clock: GpuClock,
    say: Callable[[str], None],
) -> None:
    began = reported = time.perf_counter()
    for number in range(rounds):
        if number and not time_left():
            break
        if number and time.perf_counter() - reported > QUIET:
            reported = time.perf_counter()
            left = (reported - began) / number * (rounds - number)
            say(f"  round {number} of {rounds}, {left:.0f} s left")
        for name in list(arms)[:: -1 if number % 2 else 1]:
            torch.backends.cuda.enable_cudnn_sdp(arms[name].cudnn_attention)
            window = _attempt(measured[name], arms[name].window)
            if window is None:
                del arms[name]
                _release(gpu_clock.device)
            else:
                clock, power = gpu_clock.since(time.perf_counter() - window.seconds)
                measured[name].windows.append(replace(window, clock_mhz=clock, power_w=power))


def _warmed(measured: ArmMeasurement, make: Callable[[], Arm], device: torch.device) -> Arm:
    gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if gpu else 0
    arm = make()
    torch.backends.cuda.enable_cudnn_sdp(arm.cudnn_attention)
    arm.warm_up()
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(arm.untimed):
        arm.window()
    measured.about, measured.held = arm.about, arm.held
    if gpu:
        measured.peak_memory = torch.cuda.max_memory_allocated(device) - before
    if arm.model is not None:
        measured.parameters = sum(p.numel() for p in arm.model.parameters())
    return arm


def _make_workspaces(device: torch.device) -> None:
    """Allocate the workspaces of matrix products, so that no arm's memory includes them."""
    x = torch.zeros(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        (x @ x).sum().backward()


def _attempt(measured: ArmMeasurement, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # out of memory, no compiler, ...: the other arms are measured anyway
        measured.failed = f"{type(error).__name__}: {first_line(error)}"[:160]
        return None


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def now(device: torch.device) -> float:
    """The time, after the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""Our trainer as an arm: the very step that `oelm train` takes, built by the same functions."""

from oelm.bench.load import Load
from oelm.bench.measure import TrainingArm
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data import Store
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.training.parallel import process_state
from oelm.training.stepper import make_stepper

LONG, SHORT = 10**9, 10**3  # steps: a run that earns compiling back, and one that does not


class Ours(TrainingArm):
    """One method on the texts of a store. `run_steps` is how long the run claims to be."""

    cudnn_attention = False  # training keeps off it: see `make_stepper`

    def __init__(
        self, store: Store, size: str, method: str, batch_size: int, length: int, run_steps: int = LONG
    ) -> None:
        state = process_state()
        config = RunConfig(
            task=TaskConfig(max_length=length),
            model=ModelConfig(name=size),
            method=MethodConfig(name=method),
            training=TrainingConfig(
                steps=run_steps, batch_size=batch_size, warmup=0, schedule="constant", lr=1e-4
            ),
        )
        objective = make_objective(store, length)
        raw, _ = build_model(config, store)
        self.stepper = make_stepper(config, objective, raw, state)
        self.stepper.model.train()
        plan = objective.plan("train", batch_size, None, config.training.seed)
        self.batches = plan.epoch(0)  # the same batches in every window: their shapes are all met at once
        load = Load.of(plan.lengths)
        operations = load.operations(raw.config, store.kind, causal=store.kind == "lm")  # type: ignore[arg-type]
        super().__init__(state.device, len(self.batches), load, operations)
        self.model, self.optimizer, self.taken = raw, self.stepper.optimizer, 0
        # A shape is computed at its first meeting, recorded at its second and replayed from then on.
        self.untimed = 1 if self.stepper.graphed is None else 2
        self.about = f"{method}, {self.stepper.precision}; {self.stepper.paths}"

    def step(self, k: int) -> None:
        self.stepper.take_step(self.taken, self.batches, k)
        self.taken += 1

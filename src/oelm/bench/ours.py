"""Our trainer as an arm: the very step that `oelm train` takes, built by the same functions."""

from oelm.bench.load import Load
from oelm.bench.measure import TrainingArm
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data import Store
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.training.parallel import process_state
from oelm.training.resolve import resolve_run
from oelm.training.step import make_step


class Ours(TrainingArm):
    """One method on the texts of a store."""

    cudnn_attention = False  # training keeps off it: see `PlainStep`

    def __init__(self, store: Store, size: str, method: str, batch_size: int, length: int) -> None:
        state = process_state()
        config = RunConfig(
            task=TaskConfig(max_length=length),
            model=ModelConfig(name=size),
            method=MethodConfig(name=method),
            training=TrainingConfig(
                steps=10**9, batch_size=batch_size, warmup=0, schedule="constant", lr=1e-4
            ),
        )
        objective = make_objective(store, length, 0.0, "none")
        raw, _ = build_model(config, store)
        resolved = resolve_run(config, objective, state.device)
        self.training_step = make_step(resolved, objective, raw, state)
        self.training_step.model.train()
        # The same batches in every window: their shapes are all met at once.
        self.batches = resolved.plan.epoch(0)
        load = Load.of(resolved.plan.lengths)
        operations = load.operations(raw.config, store.kind, causal=store.kind == "lm")  # type: ignore[arg-type]
        super().__init__(state.device, len(self.batches), load, operations)
        self.model, self.optimizer, self.taken = raw, self.training_step.optimizer, 0
        # A shape is computed at its first meeting, recorded at its second and replayed from then on.
        self.untimed = 2 if self.training_step.paths()["eager"] is None else 1
        self.about = f"{method}, {self.training_step.precision}; {self.training_step}"

    def step(self, k: int) -> None:
        self.training_step.take(self.taken, self.batches, k)
        self.taken += 1

"""What a plan costs: bytes at the peak, and counted work, from which a time follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memengine.memory.prediction import (
    BUCKETS,
    BUFFERS,
    OPTIMIZER,
    PARAMETERS,
    TEACHER,
    Phase,
    Prediction,
)


@dataclass(frozen=True)
class Rates:
    """How fast a machine works, in round figures: they decide which plan is the faster one.

    Attributes:
        name: Of which machine.
        flops_per_s: Of products of matrices and convolutions.
        bytes_per_s: Read and written.
        offloaded_bytes_per_s: Moved out of the device's memory, and back.
        operator_s: Seconds of an operator beside its work: Python, autograd, the launch.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    offloaded_bytes_per_s: float
    operator_s: float


_CPU = Rates(
    'one core of a CPU',
    flops_per_s=180e9,
    bytes_per_s=6e9,
    offloaded_bytes_per_s=2e9,  # to files, which the system holds for a while
    operator_s=15e-6,
)
_GPU = Rates(
    'a GPU',
    flops_per_s=60e12,
    bytes_per_s=1e12,
    offloaded_bytes_per_s=12e9,  # over 16 lanes of PCI Express 3
    operator_s=8e-6,
)


def rates_of(device_type: str) -> Rates:
    """The round figures of a kind of device: ``'cpu'``, or any other."""
    return _CPU if device_type == 'cpu' else _GPU


@dataclass(frozen=True)
class Cost:
    """What a training step costs.

    Attributes:
        peak_bytes: The most at once.
        flops: Of products of matrices and convolutions.
        moved_bytes: Read and written by operators.
        operators: How many were carried out.
        by_category: The peak's bytes by what they are for; empty where they were measured.
        before_loss_bytes: What is there when the model's ``loss`` begins.
        in_loss_bytes: The most from then until another of its parts begins.
        elsewhere_bytes: The most at any other time.
        offloaded_bytes: Moved out of the device's memory, and back.
        how: Where it is known from: ``'predicted'`` or ``'measured'``.
    """

    peak_bytes: int
    flops: int
    moved_bytes: int
    operators: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    how: str = 'predicted'
    before_loss_bytes: int = 0
    in_loss_bytes: int = 0
    elsewhere_bytes: int = 0
    offloaded_bytes: int = 0
    phases: Mapping[Phase, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, predicted: Prediction, phases: Mapping[Phase, int] | None = None) -> Cost:
        """What was predicted of a step, and of each of its phases."""
        before, in_loss = predicted.by_part.get('loss', (0, 0))
        return cls(
            predicted.peak_bytes,
            predicted.flops,
            predicted.moved_bytes,
            predicted.operators,
            predicted.by_category,
            before_loss_bytes=before,
            in_loss_bytes=in_loss,
            elsewhere_bytes=max(
                (peak for name, (_, peak) in predicted.by_part.items() if name != 'loss'), default=0
            ),
            offloaded_bytes=predicted.offloaded_bytes,
            phases=phases or {},
        )

    @classmethod
    def sum(cls, parts: Sequence[tuple[float, Cost]]) -> Cost:
        """Several costs, each so many times."""

        def total(values: Iterable[float]) -> int:
            return round(
                sum(weight * value for (weight, _), value in zip(parts, values, strict=True))
            )

        costs = [cost for _, cost in parts]
        categories = dict.fromkeys(name for cost in costs for name in cost.by_category)
        return cls(
            total(cost.peak_bytes for cost in costs),
            total(cost.flops for cost in costs),
            total(cost.moved_bytes for cost in costs),
            total(cost.operators for cost in costs),
            {name: total(cost.by_category.get(name, 0) for cost in costs) for name in categories},
            before_loss_bytes=total(cost.before_loss_bytes for cost in costs),
            in_loss_bytes=total(cost.in_loss_bytes for cost in costs),
            elsewhere_bytes=total(cost.elsewhere_bytes for cost in costs),
            offloaded_bytes=total(cost.offloaded_bytes for cost in costs),
        )

    @classmethod
    def by_phase(cls, parts: Sequence[tuple[float, Cost]]) -> Cost:
        """Several costs, each so many times: each phase by itself, of which the most is the peak.

        So what is linear in a step's depth or size stays so where another phase becomes the peak.
        Where one of them has its peak in a phase that another lacks, it is the peaks' sum.
        """
        weights, costs = zip(*parts, strict=True)
        shared = [phase for phase in costs[0].phases if all(phase in c.phases for c in costs)]
        phases = {
            phase: round(sum(w * c.phases[phase] for w, c in zip(weights, costs, strict=True)))
            for phase in shared
        }
        total = cls.sum(parts)
        if any(max((c.phases[p] for p in shared), default=-1) < c.peak_bytes for c in costs):
            return replace(total, phases=phases)
        return replace(total, peak_bytes=max(phases.values()), phases=phases)

    def with_work_of(self, other: Cost, share: float = 1.0) -> Cost:
        """The same bytes at once, and what another one computes and moves, or a share of that."""
        return replace(
            self,
            flops=int(share * other.flops),
            moved_bytes=int(share * other.moved_bytes),
            offloaded_bytes=int(share * other.offloaded_bytes),
            operators=other.operators,
        )

    @property
    def at_update_bytes(self) -> int:
        """What is there when the optimiser updates, with a gradient of each parameter."""
        there = (PARAMETERS, PARAMETERS, OPTIMIZER, BUFFERS, TEACHER, BUCKETS)
        return sum(self.by_category.get(name, 0) for name in there)

    def without_activations(self) -> Cost:
        """The least bytes that are left by what makes activations and transients smaller."""
        least = self.at_update_bytes
        return replace(
            self, peak_bytes=least, before_loss_bytes=least, in_loss_bytes=0, elsewhere_bytes=least
        )

    def without_state(self) -> Cost:
        """The least that is left by what makes smaller what is there at every update.

        A copy of the parameters, which an update may make, is counted with it.
        """
        most = self.at_update_bytes + self.by_category.get(PARAMETERS, 0)
        return replace(
            self,
            peak_bytes=self.peak_bytes - most,
            by_category={},
            before_loss_bytes=self.before_loss_bytes - most,
            elsewhere_bytes=self.elsewhere_bytes - most,
        )

    def without_loss(self) -> Cost:
        """The least that is left by what makes a loss smaller."""
        return replace(self, peak_bytes=max(self.before_loss_bytes, self.elsewhere_bytes))

    def seconds(self, rates: Rates) -> float:
        """The time that the counted work takes at these rates, one thing after another."""
        return (
            self.flops / rates.flops_per_s
            + self.moved_bytes / rates.bytes_per_s
            + self.offloaded_bytes / rates.offloaded_bytes_per_s
            + self.operators * rates.operator_s
        )

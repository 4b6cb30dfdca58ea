"""Stand-ins for the GPU backends, for tests of proofs: on CPU tensors, with the arithmetic of the torch backend.

They have the real backends' families, refusals and records; a fault makes the kernels of one family wrong, slow or
crash. Times are those of a clock that only calls move. As a program it makes checks for a proof:
`python stand_ins.py FAULTS DEVICE`, with FAULTS as JSON.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch

from tilewise.backends import hopper, triton
from tilewise.backends import torch as plain
from tilewise.backends.gpu import target
from tilewise.backends.gpu.target import nvidia
from tilewise.core.plan import Plan
from tilewise.dispatch import planner
from tilewise.testing import families

REAL = {"hopper": hopper, "triton": triton}
FACTS = {"device": "Stand-in H200", "gpu": "sm_90, 132 processors", "driver": "550.1", "triton": "3.7.1"}
COSTS = {"hopper": 1.0, "triton": 1.5, "torch": 2.0}  # seconds of a call, three times as many with the fault "late"
CLOCK = SimpleNamespace(seconds=0.0, perf_counter=lambda: CLOCK.seconds)


@dataclass
class StandIn:
    """A GPU backend. `faults`: what is wrong with its families, by name; `facts`: of the machine."""

    name: str
    faults: dict = field(default_factory=dict)
    facts: dict = field(default_factory=lambda: dict(FACTS))
    calls: dict = field(default_factory=dict)  # by family

    def there(self, problem):
        return replace(problem, device=torch.device("cuda"))

    def supports(self, problem):
        return REAL[self.name].supports(self.there(problem))

    def supports_backward(self, problem):
        return REAL[self.name].supports_backward(self.there(problem))

    def family(self, problem):
        return REAL[self.name].family(self.there(problem))

    def unproven(self, problem):
        return REAL[self.name].unproven(self.there(problem))

    def proof_facts(self, device):
        return dict(self.facts)

    def plan(self, problem):
        return Plan(problem, self.name, self.family(problem), (64, 64))

    plan_backward = plan

    def run(self, plan, tensors):
        plain.run(plan, tensors)
        self.spoil(plan, tensors.out)

    def run_backward(self, plan, tensors):
        plain.run_backward(plan, tensors)
        self.spoil(plan, next(iter(tensors.gradients().values())))

    def spoil(self, plan, result):
        family = self.family(plan.problem)
        fault, self.calls[family] = self.faults.get(family), self.calls.get(family, 0) + 1
        CLOCK.seconds += COSTS[self.name] * (3 if fault == "late" else 1)
        first = (0,) * result.ndim
        if fault == "wrong":
            result[first] += 1.0
        elif fault == "random":
            result[first] *= 1 + 0.01 * (self.calls[family] % 2)  # within the bound of 16 bits
        elif fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "full":
            raise RuntimeError("CUDA error: out of memory")


@dataclass
class Plain:
    """The torch backend, whose calls take their time by the clock of these tests."""

    def __getattr__(self, name):
        return getattr(plain, name)

    def run(self, plan, tensors):
        CLOCK.seconds += COSTS["torch"]
        plain.run(plan, tensors)

    def run_backward(self, plan, tensors):
        CLOCK.seconds += COSTS["torch"]
        plain.run_backward(plan, tensors)


def install(faults, patch=setattr, facts=FACTS):
    """Replaces the planner's GPU backends and the installed Triton, 3.7.1 on an H200. `patch` as `setattr`."""
    stand_ins = {name: StandIn(name, faults.get(name, {}), dict(facts)) for name in REAL} | {"torch": Plain()}
    real = planner.load
    for backend in REAL.values():
        patch(backend, "target_of", lambda device: nvidia(90))
    patch(target, "triton_version", lambda: "3.7.1")
    patch(families, "time", CLOCK)
    patch(planner, "BACKENDS", ("hopper", "triton", "torch", "reference"))
    patch(planner, "load", lambda name: stand_ins.get(name) or real(name))
    return stand_ins


if __name__ == "__main__":
    install(json.loads(sys.argv[1]))
    from tilewise.testing.prove_child import main

    main()

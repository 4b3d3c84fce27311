"""Rules with PyTorch's GradScaler, two of them, beside the handle's own scale."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from clamp import amp
from tests.loop.machine import Loop, Spec, networks, specs
from tests.loop.model import Grad, Optimizer, Scale, true

scalers = st.sampled_from((0, 0, 0, 1))


class Manual:
    """The model of a GradScaler: where each optimizer is between two updates."""

    def __init__(self, scale: float) -> None:
        self.scale = Scale(scale, interval=2)
        self.used = False  # whether a loss was scaled
        self.stages: dict[Optimizer, str] = {}
        self.checked: dict[Optimizer, int] = {}  # how many gradients
        self.found: set[Optimizer] = set()  # whose gradients had an inf or nan

    def ready(self) -> None:
        """An update is over."""
        self.stages, self.checked, self.found = {}, {}, set()

    def refuses_to_unscale(self, optimizer: Optimizer) -> bool:
        """Whether ``unscale_`` raises."""
        graded = [param.grad for param in optimizer.params if param.grad is not None]
        foreign = any(grad.by not in (None, self.scale) for grad in graded)
        return optimizer in self.stages or not self.used or foreign

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer, each by the scale that made it; a user's by that of now."""
        graded = [param for param in optimizer.params if param.grad is not None]
        for param in graded:
            grad = param.grad
            if grad.by_hand:
                grad = Grad(grad.value / self.scale.scale, grad.slack)
            param.grad = true(grad)
        self.stages[optimizer] = "unscaled"
        self.checked[optimizer] = len(graded)
        self.look(optimizer)

    def look(self, optimizer: Optimizer) -> None:
        """Looks for an inf or nan."""
        if any(param.grad is not None and param.grad.bad for param in optimizer.params):
            self.found.add(optimizer)


class WithScalers(Loop):
    """PyTorch's loop."""

    @initialize()
    def make_scalers(self) -> None:
        self.manual = [Manual(2.0**5), Manual(2.0**3)]
        self.scalers: list[Any] = [
            amp.GradScaler(init_scale=manual.scale.scale, growth_interval=2) for manual in self.manual
        ]

    @rule(number=scalers, spec=specs)
    def scale_and_backward(self, number: int, spec: Spec) -> None:
        manual, scaler = self.manual[number], self.scalers[number]
        if not 2.0**2 <= manual.scale.scale <= 2.0**7:
            self.set_scale(number, 2.0**5)
        loss, node = self.make_loss(*spec)
        if node.grad_fn is not None:
            scaler.scale(node).backward()
            manual.used = True
            self.add(self.gradients(loss), manual.scale)

    @rule(number=scalers, which=networks)
    def unscale_(self, number: int, which: int) -> None:
        manual, optimizer = self.manual[number], self.optimizers[which]
        call = lambda: self.scalers[number].unscale_(self.real.optimizers[optimizer])  # noqa: E731
        if not manual.used and all(param.grad is None for param in optimizer.params):
            return
        if manual.refuses_to_unscale(optimizer):
            self.raises(RuntimeError, call)
        else:
            call()
            manual.unscale(optimizer)
            self.regraded |= set(optimizer.params)

    @rule(number=scalers, which=networks)
    def scaler_step(self, number: int, which: int) -> None:
        manual, optimizer = self.manual[number], self.optimizers[which]
        call = lambda: self.scalers[number].step(self.real.optimizers[optimizer])  # noqa: E731
        stage = manual.stages.get(optimizer)
        if not manual.used and all(param.grad is None for param in optimizer.params):
            return
        if stage == "stepped" or (stage is None and manual.refuses_to_unscale(optimizer)):
            self.raises(RuntimeError, call)
            return
        if stage is None:
            manual.unscale(optimizer)
            self.regraded |= set(optimizer.params)
        elif optimizer.is_scaled():
            self.raises(RuntimeError, call)
            return
        if not manual.checked[optimizer]:
            self.raises(RuntimeError, call)
            return
        manual.look(optimizer)
        call()
        if optimizer not in manual.found:
            if not optimizer.overflowed():
                self.written |= optimizer.step()
            optimizer.pending = set()
        manual.stages[optimizer] = "stepped"

    @rule(number=scalers)
    def update(self, number: int) -> None:
        manual, scaler = self.manual[number], self.scalers[number]
        if not any(manual.checked.values()):
            self.raises(RuntimeError, scaler.update)
            return
        scaler.update()
        manual.scale.adjust(bool(manual.found))
        manual.ready()
        assert scaler.get_scale() == manual.scale.scale

    @rule(number=scalers, exponent=st.integers(2, 6))
    def update_to(self, number: int, exponent: int) -> None:
        self.set_scale(number, 2.0**exponent)

    def set_scale(self, number: int, scale: float) -> None:
        self.scalers[number].update(scale)
        self.manual[number].scale.scale = scale
        self.manual[number].ready()

    @rule(number=scalers, exponent=st.integers(2, 6))
    def load_scaler(self, number: int, exponent: int) -> None:
        manual, scaler = self.manual[number], self.scalers[number]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**exponent, "_growth_tracker": 0})
        manual.scale.scale, manual.scale.tracker = 2.0**exponent, 0
        manual.ready()

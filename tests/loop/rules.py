"""What a training loop can do: the rules of the random loops (machine.py)."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule
from netcl import autograd as ag
from netcl.optim import clip_grad_norm

from clamp.bridge import Tensor
from tests.loop.device import Interrupted, fail_below, interrupted_read
from tests.loop.machine import RAISES, Loop, Spec, bools, networks, numbers, poisons, regions, specs
from tests.loop.model import SLACK, Grad, Optimizer, Param, Pass, Passed, Scale

_BODIES = (
    "backward",
    "backward",
    "backward",
    "tape",
    "twice",
    "empty",
    "plain backward inside",
    "raise before",
    "raise after",
    "interrupt after",
    "fail in backward",
    "clip inside",
    "step inside",
    "plant",
    "clear inside",
    "clear inside and raise",
)
freezes = st.sampled_from(("_frozen", "requires_grad"))
whom = st.sets(st.integers(0, 2), min_size=1, max_size=3).map(sorted)


class Basics(Loop):
    """Losses, scaled or not, and steps."""

    @rule(net=networks, squares=bools, seed=numbers, poison=poisons, region=regions, fails=st.sampled_from((0, 0, 1)))
    def plain_backward(self, net: int, squares: bool, seed: int, poison: float | None, region: str, fails: int) -> None:
        loss, node = self.make_loss(net, squares, seed, poison, region)
        if node.grad_fn is None:  # nothing in it is trained
            self.raises(RAISES, node.backward)
        elif fails:
            fail_below(node, ZeroDivisionError())
            self.raises(ZeroDivisionError, node.backward)
        else:
            node.backward()
            self.add(self.gradients(loss))

    @rule(spec=specs, named=whom, body=st.sampled_from(_BODIES), own=bools)
    def scale_loss(self, spec: Spec, named: list[int], body: str, own: bool) -> None:
        """A pass with the two lines; with ``own`` for the optimizer of the network."""
        loss, node = self.make_loss(*spec)
        optimizers = self.named_by([spec[0]] if own else named)
        manager, scale = self.manager(node, optimizers)
        if scale is None:
            return
        if body == "step inside" and any(optimizer.overflowed() for optimizer in self.optimizers):
            return  # the step is skipped for what came before: nothing wrong is done with these gradients
        run = Pass(p for optimizer in optimizers for p in optimizer.params)
        passed = self.gradients(loss)
        reached = [param for param in run.earlier if param in passed]
        inside = partial(self.body, node, body, reached, optimizers)
        harmless = body == "plain backward inside" and not scale.exists
        if reached and (harmless or body in ("backward", "tape", "twice", "plant", "clear inside")):
            self.in_with(manager, inside)
            if body == "clear inside":
                run.earlier = dict.fromkeys(run.earlier)
            self.add(passed, scale)
            if body == "twice" or harmless:
                self.add(passed, scale)
            if body == "plant":
                reached[0].grad.value = np.full_like(reached[0].value, np.inf)
            self.end_pass(run, set(optimizers), scale)
            self.losses_of_wrapped += self.wrapped is not None
            return
        own_errors = {"interrupt after": Interrupted}.get(body, ZeroDivisionError)
        fails = body in ("raise before", "raise after", "interrupt after", "fail in backward", "clear inside and raise")
        has_graph = node.grad_fn is not None
        self.raises(own_errors if fails and has_graph else RAISES, lambda: self.in_with(manager, inside))
        run.give_up()

    @rule(first=specs, second=specs, ours=whom, theirs=whom, early=bools, fails=bools)
    def nested_scale_loss(
        self, first: Spec, second: Spec, ours: list[int], theirs: list[int], early: bool, fails: bool
    ) -> None:
        """Two passes, one inside the other; ``early``: the outer one's backward comes before the inner pass."""
        if self.wrapped is not None or any(param.grad is not None and param.grad.bad for param in self.all_params()):
            return  # what is bad already may count as the outer pass's, or not
        outer, outer_node = self.make_loss(*first)
        inner, inner_node = self.make_loss(*second)
        outer_of, inner_of = self.named_by(ours), self.named_by(theirs)
        if second[3] is not None and not set(outer_of) <= set(inner_of):
            return  # an inf of the inner pass may count as the outer one's, or not
        passed, inner_passed = self.gradients(outer), self.gradients(inner)
        if not self.reaches(passed, outer_of) or not self.reaches(inner_passed, inner_of):
            return
        manager = self.manager(outer_node, outer_of)[0]
        with_inner = self.manager(inner_node, inner_of)[0]

        inner_body = "raise after" if fails else "backward"

        def body(scaled: Any) -> None:
            if early:
                scaled.backward()
            self.in_with(with_inner, partial(self.body, inner_node, inner_body, [], []))
            if not early:
                scaled.backward()

        run = Pass(p for optimizer in outer_of for p in optimizer.params)
        if fails:
            self.raises(ZeroDivisionError, lambda: self.in_with(manager, body))
            run.give_up()
            return
        self.in_with(manager, body)
        if early:
            self.add(passed, self.scale)
        run_inner = Pass(p for optimizer in inner_of for p in optimizer.params)
        self.add(inner_passed, self.scale)
        self.end_pass(run_inner, set(inner_of), self.scale)
        if not early:
            self.add(passed, self.scale)
        self.end_pass(run, set(outer_of), self.scale)

    @rule(
        which=networks,
        clears=bools,
        passes=st.lists(st.tuples(bools, numbers, poisons), min_size=1, max_size=3),
        clips=bools,
        steps=st.integers(1, 2),
    )
    def iteration(
        self, which: int, clears: bool, passes: list[tuple[bool, int, float | None]], clips: bool, steps: int
    ) -> None:
        """What one turn of a loop does for one optimizer: all of it, or most."""
        if clears:
            self.zero_grad(which)
        for squares, seed, poison in passes:
            self.scale_loss((which, squares, seed, poison, "as it is"), [which], "backward", True)
            self.everything_is_as_it_must_be()
        if clips:
            self.clip(which)
            self.everything_is_as_it_must_be()
        for _ in range(steps):
            self.step(which, None)
            self.everything_is_as_it_must_be()

    @rule(squares=bools, seed=numbers, region=regions, retains=bools, tape=bools)
    def backward_after_the_step(self, squares: bool, seed: int, region: str, retains: bool, tape: bool) -> None:
        """The network of one layer, whose gradients read no weight: with ``retain_graph`` those of the forward, else an
        error that names it."""
        self.zero_grad(2)
        loss, node = self.make_loss(2, squares, seed, None, region)
        passed = self.gradients(loss)
        optimizer = self.optimizers[2]
        if optimizer.pending or not all(param in passed for param in optimizer.params):
            return

        def run(**options: bool) -> None:
            ag.Tape().backward(node, **options) if tape else node.backward(**options)

        run(**({"retain_graph": True} if retains else {}))
        self.add(passed)
        self.step(2, None)
        if not retains or region == "checkpoint":
            self.raises(RuntimeError, run)
            return
        run()
        self.add(passed)

    def named_by(self, numbers: list[int]) -> list[Optimizer]:
        return self.optimizers[:1] if self.wrapped is not None else [self.optimizers[n] for n in numbers]

    def reaches(self, passed: Passed, optimizers: list[Optimizer]) -> bool:
        return any(param in passed for optimizer in optimizers for param in optimizer.params)

    def manager(self, node: Any, optimizers: list[Optimizer]) -> tuple[Any, Scale | None]:
        """``scale_loss`` of the handle or, if there is one, of the wrapped optimizer, with the scale it uses."""
        if self.wrapped is None:
            return self.handle.scale_loss(node, [self.real.optimizers[o] for o in optimizers]), self.scale
        self.raises(RuntimeError, lambda: self.handle.scale_loss(node, self.wrapped))
        if self.losses_of_wrapped == 2:
            self.raises(RuntimeError, lambda: self.in_with(self.wrapped.scale_loss(node), lambda scaled: None))
            return None, None
        return self.wrapped.scale_loss(node), self.own_scales[1 + self.losses_of_wrapped]

    def body(self, node: Any, body: str, reached: list[Param], named: list[Optimizer], scaled: Any) -> None:
        """What stands inside the ``with``."""
        for optimizer in named if body.startswith("clear inside") else ():
            self.real.optimizers[optimizer].zero_grad()
            optimizer.pending = set()
        if body in ("raise before", "clear inside and raise"):
            raise ZeroDivisionError
        if body == "fail in backward":
            fail_below(node, ZeroDivisionError())
        if body == "plain backward inside":
            node.backward()
        if body == "tape":
            ag.Tape().backward(scaled)
        elif body != "empty":
            scaled.backward()
        self.after_backward(body, reached, scaled)

    def after_backward(self, body: str, reached: list[Param], scaled: Any) -> None:
        if body == "twice":
            scaled.backward()
        elif body == "raise after":
            raise ZeroDivisionError
        elif body == "interrupt after":
            raise Interrupted
        elif body == "clip inside":
            clip_grad_norm([self.real.params[p] for p in reached], 1.0)
        elif body == "step inside":
            for optimizer in self.optimizers:
                if set(reached) & set(optimizer.params):
                    self.real.optimizers[optimizer].step()
        elif body == "plant" and reached:
            self.real.spoil(self.real.params[reached[0]])

    def end_pass(self, run: Pass, reached: set[Optimizer], scale: Scale) -> None:
        """The model's side of a pass that ended well."""
        bad = run.end()
        self.regraded |= set(run.earlier)
        scale.passed(reached, bad)

    # ------------------------------------------------------------------------------------------ steps

    @rule(number=networks, interrupt=st.sampled_from((None, None, None, "read", "step")))
    def step(self, number: int, interrupt: str | None) -> None:
        optimizer = self.optimizers[number]
        real = self.real.optimizers[optimizer]
        if self.wrapped is not None and number == 0:
            real, self.losses_of_wrapped = self.wrapped, 0
        if optimizer.is_scaled() and not optimizer.overflowed():
            self.raises(RuntimeError, real.step)
            return
        skipped = optimizer.overflowed() or optimizer.has_bad()
        is_made = False
        if interrupt == "read" and optimizer.pending:
            with interrupted_read(), suppress(Interrupted):
                real.step()
                is_made = True  # nothing to wait for: the end of the pass has heard of it
        elif interrupt == "step" and not skipped and not optimizer.is_adam:
            self.real.optimizers[optimizer].interrupt = True
            self.raises(Interrupted, real.step)
        if not is_made:
            real.step()
        report = self.handle.last_step
        moves = any(param.grad is not None and not param.frozen for param in optimizer.params)
        assert report.stepped == (moves and not skipped)
        assert bool(report.reason) == (not report.stepped)
        assert bool(report.infs or report.nans) == optimizer.has_bad() == bool(report.parameters)
        if not skipped:
            self.written |= optimizer.step()
        optimizer.pending = set()

    @rule(number=networks)
    def zero_grad(self, number: int) -> None:
        self.real.optimizers[self.optimizers[number]].zero_grad()
        self.optimizers[number].pending = set()
        for param in self.optimizers[number].params:
            param.grad = None

    @rule(number=networks)
    def clip(self, number: int) -> None:
        optimizer = self.optimizers[number]
        real = [self.real.params[param] for param in optimizer.params]
        graded = [param for param in optimizer.params if param.grad is not None and not param.frozen]
        if optimizer.is_scaled():
            self.raises(RuntimeError, lambda: clip_grad_norm(real, 4.0))
        elif graded and not any(param.grad.bad for param in graded):
            clip_grad_norm(real, 4.0)
            norm = np.sqrt(sum((param.grad.value**2).sum() for param in graded))
            factor = min(1.0, 4.0 / (norm + 1e-6))
            off = np.sqrt(sum((param.grad.slack**2).sum() for param in graded)) / max(norm, 4.0)
            for param in graded:
                value = param.grad.value * factor
                slack = param.grad.slack * factor + np.abs(value) * (off + 2.0**-18)
                param.grad = Grad(value, slack, by_hand=param.grad.by_hand)
                self.regraded.add(param)

    # ------------------------------------------------------------------------------------------ users' hands

    @rule(net=networks, layer=st.integers(0, 1), part=st.integers(0, 1), how=freezes)
    def freeze_or_thaw(self, net: int, layer: int, part: int, how: str) -> None:
        param = self.layers[net][layer % len(self.layers[net])][part]
        real = self.real.params[param]
        param.frozen = "" if param.frozen else how
        real._frozen = param.frozen == "_frozen"
        real.requires_grad = param.frozen != "requires_grad"

    @rule(net=networks, layer=st.integers(0, 1), part=st.integers(0, 1))
    def write_value(self, net: int, layer: int, part: int) -> None:
        self.write(self.layers[net][layer % len(self.layers[net])][part])

    @rule(net=networks, part=st.integers(0, 1), seed=numbers)
    def set_gradient_by_hand(self, net: int, part: int, seed: int) -> None:
        param = self.layers[net][-1][part]
        value = np.random.default_rng(seed).choice([-3.0, -1.0, 1.0, 2.0], param.value.shape)
        self.real.params[param].grad = self.real.tensor(value)
        param.grad = Grad(value, np.zeros_like(value), by_hand=True)
        self.regraded.add(param)

    @rule(net=networks, seed=numbers)
    def infer(self, net: int, seed: int) -> None:
        """Forward without gradients, which reads and fills the cache of weights."""
        x = np.random.default_rng(seed).choice([-2.0, -1.0, 1.0, 2.0], (2, 3))
        with ag.no_grad():
            out: Tensor = self.real.nets[net](self.real.tensor(x)).value
        want, size = x, np.abs(x)
        for weight, bias in self.layers[net]:
            want = want @ weight.value + bias.value
            size = size @ np.abs(weight.value) + np.abs(bias.value)
        assert (np.abs(out.to_host() - want) <= SLACK[self.dtype] * size).all()

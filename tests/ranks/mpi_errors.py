"""Errors of one rank, and differences between ranks: what tests/ranks/test_distributed.py starts with mpirun, as it
starts tests/ranks/mpi_child.py."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Tensor
from clamp.ranks import parameters as rank_parameters
from clamp.ranks import rendezvous
from clamp.ranks.mpi import RankError
from tests.networks import batch, mlp, weights_of
from tests.ranks.mpi_child import (
    COMM,
    RANK,
    SIZE,
    backward,
    gradients,
    main,
    mean_loss,
    mode,
    part,
    same_everywhere,
    training,
)


def train(queue: cl.CommandQueue, handle: Any, model: Any, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(handle, optimizer, model, part(queue, step))
        optimizer.step()
        assert handle.last_step.stepped


def overwrite(param: Tensor) -> None:
    """Another bit in one element."""
    host = param.to_host().copy()
    host.reshape(-1)[0] = np.nextafter(host.reshape(-1)[0], np.float32(np.inf), dtype=np.float32)
    param.write(host)


def average(ranks: Any, model: Any) -> None:
    """The end of a pass: every parameter's gradient is its number plus the rank."""
    params = model.parameters()
    grads = [Tensor.from_host(p.queue, np.full(p.shape, n + RANK, np.float32)) for n, p in enumerate(params)]
    for number, mean in enumerate(ranks.average(params, grads, 1.0)):
        assert (mean.to_host() == number + (SIZE - 1) / 2).all()


def error_in(run: Callable[[], None]) -> str:
    """What it raises, in words; nothing if it does not."""
    try:
        run()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def heard(message: str) -> str:
    """What rank 1's ValueError is to this rank."""
    return f"ValueError: {message}" if RANK == 1 else f"RankError: rank 1 failed: ValueError: {message}"


@mode
def an_error_in_a_pass_reaches_the_others(queue: cl.CommandQueue) -> None:
    """Before anything was done in it, in the inner of two, in the outer after it; whoever catches it goes on."""
    with training(queue) as (handle, ranks, model, optimizer):

        def one(fails: bool, inner: Callable[[], None] = lambda: None) -> None:
            with ranks.one_pass():
                inner()
                if RANK == 1 and fails:
                    raise ValueError("two elements")
                average(ranks, model)

        def refused_by_rank_1() -> None:
            with ranks.checks():
                if RANK == 1:
                    raise ValueError("two elements")
            one(False)

        def well_but_inner() -> None:
            assert error_in(lambda: one(True)) == heard("two elements")

        assert error_in(lambda: one(True)) == heard("two elements")
        assert error_in(refused_by_rank_1) == heard("two elements")
        assert error_in(lambda: one(False, inner=well_but_inner)) == ""
        assert error_in(lambda: one(True, inner=lambda: one(False))) == heard("two elements")
        train(queue, handle, model, optimizer)
        assert same_everywhere(weights_of(model))


@mode
def what_scale_loss_refuses_reaches_the_others(queue: cl.CommandQueue) -> None:
    """Whatever it is; gradients of before stay as they were, and all go on together."""
    with training(queue) as (handle, _, model, optimizer):
        train(queue, handle, model, optimizer)
        before = gradients(model)

        def loss() -> Any:
            return mean_loss(model, part(queue, 0))

        def outputs() -> Any:
            return model(ag.tensor(part(queue, 0)[0]))

        for refused in (
            lambda: handle.scale_loss(outputs(), optimizer),
            lambda: handle.scale_loss(loss().value, optimizer),
            lambda: handle.scale_loss(loss(), "optimizer"),
            lambda: handle.scale_loss(loss(), []),
            lambda: handle.scale_loss(loss(), optimizer, loss_id=7),
            lambda: handle.scale_loss(ag.tensor(loss().value), optimizer),
        ):

            def one(refused: Any = refused) -> None:
                if RANK == 1:
                    with refused() as scaled_loss:
                        scaled_loss.backward()
                else:
                    backward(handle, optimizer, model, part(queue, 0))

            error = error_in(one)
            assert error if RANK == 1 else error.startswith("RankError: rank 1 failed: "), error
            assert all(np.array_equal(a, b) for a, b in zip(before, gradients(model), strict=True))
        train(queue, handle, model, optimizer, steps=2)
        assert same_everywhere(weights_of(model))


@mode
def no_backward_inside_is_an_error_if_it_is_nobodys(queue: cl.CommandQueue) -> None:
    with training(queue) as (handle, _, model, optimizer):

        def one(runs: bool) -> None:
            with handle.scale_loss(mean_loss(model, part(queue, 0)), optimizer) as scaled_loss:
                if runs:
                    scaled_loss.backward()

        assert error_in(lambda: one(False)).startswith("RuntimeError: no backward has reached a parameter on any rank")
        with pytest.warns(UserWarning, match="had no gradient in this pass"):
            one(RANK == 0)
        optimizer.step()
        assert handle.last_step.stepped
        assert same_everywhere(weights_of(model))


@mode
def an_error_may_be_heard_late(queue: cl.CommandQueue) -> None:
    """The others are still busy with the pass when rank 1 has given up waiting for them."""
    rendezvous._PATIENCE = 0.0
    with training(queue) as (handle, ranks, model, optimizer):

        def one() -> None:
            with ranks.one_pass():
                if RANK == 1:
                    raise ValueError("late")
                COMM.barrier()
                average(ranks, model)

        assert error_in(one) == heard("late")
        if RANK == 1:
            COMM.barrier()
        train(queue, handle, model, optimizer, steps=2)
        assert same_everywhere(weights_of(model))
    rendezvous._PATIENCE = 10.0


@mode
def a_pass_without_an_average_is_an_error(queue: cl.CommandQueue) -> None:
    with training(queue) as (handle, ranks, model, optimizer):
        with pytest.raises(RuntimeError, match="without averaging its gradients"), ranks.one_pass():
            pass
        train(queue, handle, model, optimizer)


@mode
def a_layer_frozen_on_one_rank_is_noticed(queue: cl.CommandQueue) -> None:
    with training(queue, RANK) as (handle, ranks, model, optimizer):
        ranks.broadcast(model)
        train(queue, handle, model, optimizer, steps=2)
        weight = model.layers[2].weight
        if RANK == 1:
            weight.requires_grad = False
        before = weights_of(model)
        with pytest.raises(RankError, match=r"layers\.2\.weight: frozen on rank 1 only.*on every rank"):
            train(queue, handle, model, optimizer)
        assert all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
        weight.requires_grad = False
        train(queue, handle, model, optimizer, steps=2)  # frozen everywhere is well
        assert same_everywhere(weights_of(model))


@mode
def parameters_that_part_are_noticed(queue: cl.CommandQueue) -> None:
    """A write to one of them, or to a master, within as many passes as there are; another setting at the next pass."""
    for level in ("O1", "O2"):
        with training(queue) as (handle, ranks, model, optimizer):
            if level == "O2":
                model, optimizer = amp.decorate(model, optimizer, level="O2")
            train(queue, handle, model, optimizer, steps=2)
            if RANK == SIZE - 1:
                overwrite(optimizer.params[1])
            errors = [
                error_in(lambda: backward(handle, optimizer, model, part(queue, 0)))  # noqa: B023
                for _ in range(len(optimizer.params))
            ]
            found = [error for error in errors if error]
            assert found
            assert re.search(rf"parameter 1 of shape .*, rank {SIZE - 1} from rank 0\. They were the same", found[0])
            ranks.broadcast(model, optimizer)
            optimizer.zero_grad()
            train(queue, handle, model, optimizer, steps=6)
            optimizer.lr = 0.1 if RANK else 0.2
            train(queue, handle, model, optimizer)
            with pytest.raises(RankError, match=r"from rank 0\. They were the same before"):
                train(queue, handle, model, optimizer)


@mode
def a_parameter_replaced_by_an_equal_one_is_no_difference(queue: cl.CommandQueue) -> None:
    with training(queue) as (handle, _, model, optimizer):
        train(queue, handle, model, optimizer, steps=2)
        if RANK == 1:
            old = model.layers[0].weight
            model.layers[0].weight = optimizer.params[0] = type(old).from_host(queue, old.to_host())
        train(queue, handle, model, optimizer, steps=3)
        assert same_everywhere(weights_of(model))


@mode
def devices_that_round_differently_may_drift(queue: cl.CommandQueue) -> None:
    """But begin with the same bits."""
    device = rank_parameters._device
    rank_parameters._device = lambda params: bytes([RANK])
    with training(queue) as (handle, _, model, optimizer):
        train(queue, handle, model, optimizer)
        if RANK == 1:
            overwrite(model.layers[0].weight)
        train(queue, handle, model, optimizer, steps=5)
    with training(queue, RANK) as (handle, _, model, optimizer), pytest.raises(RankError, match=r"ranks\.broadcast"):
        train(queue, handle, model, optimizer)
    rank_parameters._device = device


@mode
def another_order_of_equal_parameters_is_noticed(queue: cl.CommandQueue) -> None:
    """Two biases of zeros: their bits do not tell them apart."""
    with amp.init() as handle:
        model = mlp(queue, 8, 8, 8)
        params = model.parameters()
        if RANK == 1:
            params[1], params[3] = params[3], params[1]
        optimizer = SGD(params, lr=0.1)
        handle.distribute(COMM).broadcast(model)
        data = batch(queue, 4, 8, 8)
        with pytest.raises(RankError, match="another order: build the optimizers alike"):
            backward(handle, optimizer, model, data)


@mode
def a_pass_without_gradients_is_an_error_or_one_warning(queue: cl.CommandQueue) -> None:
    """If nobody has any, an error on all ranks; if one has none it counts as zeros, and all say so once."""
    with training(queue) as (_, ranks, model, _):
        params = model.parameters()
        none = [None] * len(params)
        with pytest.raises(RuntimeError, match="no backward has reached a parameter on any rank"), ranks.one_pass():
            ranks.average(params, none, 1.0)
        some = [Tensor.from_host(queue, np.full(param.shape, SIZE, np.float32)) for param in params]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with ranks.one_pass():
                    means = ranks.average(params, some if RANK == 0 else none, 1.0)
                assert all((mean.to_host() == 1).all() for mean in means)
        others = ", ".join(str(rank) for rank in range(1, SIZE))
        assert [str(warning.message).partition(" had no gradient")[0] for warning in said] == [f"rank {others}"]


if __name__ == "__main__":
    main()

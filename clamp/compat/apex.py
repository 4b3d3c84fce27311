"""NVIDIA apex's later API: ``amp.initialize`` with opt_levels, ``amp.scale_loss``, the state of the scalers.

The API of 2018 (``init``, handles, decorators, registration) is clamp's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from clamp import session
from clamp.bridge import HALF_DTYPES, DTypeLike, Node, canonical_dtype
from clamp.casting.module_rules import ModuleRules, module_rules
from clamp.casting.policy_table import check_dtype
from clamp.casting.regions import InitCall, Region, given_to
from clamp.compat.scalers import require_number
from clamp.handle import NoOpHandle
from clamp.models import as_list, cast_calls, dtypes_of, to_16_bit
from clamp.ops.arguments import whole_number, yes_or_no
from clamp.params.masters import require_kept, require_steppable
from clamp.scaling.dynamic_scale import DynamicLossScale, ScaleRule
from clamp.scaling.loss_scale import LossScale, NoLossScale
from clamp.session import load_state_dict, state_dict

__all__ = ["initialize", "load_state_dict", "scale_loss", "state_dict"]


@dataclass(frozen=True)
class Properties:
    """The properties of an opt_level. Names and values are apex's."""

    cast_model_type: str | None
    patch_netcl: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | str | None
    loss_scale: str | float


OPT_LEVELS = {
    "O0": Properties("float32", False, None, False, 1.0),
    "O1": Properties(None, True, None, None, "dynamic"),
    "O2": Properties("float16", False, True, True, "dynamic"),
    "O3": Properties("float16", False, False, False, 1.0),
}

_SAYS = {
    "O0": "Pure FP32 training.",
    "O1": "Insert automatic casts around netcl's functions.",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "Pure FP16 training.",
}


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: DTypeLike | None = None,
    patch_netcl_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: DTypeLike | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: DTypeLike = "float16",
    patch_torch_functions: bool | None = None,
    rounding_seed: int = 0,
    modules: Mapping[str, DTypeLike] | None = None,
) -> Any:
    """Turns on mixed precision at one of apex's opt_levels, for these models and optimizers, until ``amp.shutdown()``.

    | level | cast_model_type | patch_netcl | keep_batchnorm_fp32 | master_weights | loss_scale |
    |---|---|---|---|---|---|
    | ``"O0"`` | ``"float32"`` | no | | no | 1.0 |
    | ``"O1"`` | | yes | | | dynamic |
    | ``"O2"`` | ``dtype`` | no | yes | yes | dynamic |
    | ``"O3"`` | ``dtype`` | no | no | no | 1.0 |

    A model with a cast_model_type casts its inputs to it and its outputs to float32. Its parameters are changed in
    place, and optimizers step their fp32 masters.

    Args:
        models: a model, or a list of them.
        optimizers: an optimizer, a list of them, or None.
        enabled: False changes nothing; ``amp.scale_loss`` then yields the loss itself.
        opt_level: see above. The next five arguments override single properties of it.
        cast_model_type: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
        patch_netcl_functions: apex's ``patch_torch_functions`` (which is accepted too): cast in netcl's functions.
        keep_batchnorm_fp32: whether batch norm's parameters stay fp32. Its statistics always do.
        master_weights: whether the fp32 masters keep precision from one step to the next; or ``"remainder"``,
            ``"kahan"`` or ``"stochastic"``, which train 16-bit parameters without fp32 masters (see ``amp.decorate``).
        loss_scale: a number, or ``"dynamic"``.
        cast_model_outputs: dtype of the models' outputs.
        num_losses: how many losses have a scale of their own; ``scale_loss`` picks it with ``loss_id``.
        verbosity: 1 prints the level and its properties, 0 nothing.
        min_loss_scale: limit of a dynamic scale; 2**-14 if not given.
        max_loss_scale: limit of a dynamic scale.
        dtype: the 16-bit dtype; with bfloat16 losses are not scaled unless ``loss_scale`` is given.
        rounding_seed: of ``master_weights="stochastic"``.
        modules: AMP dtypes of parts of the models, as of ``amp.init``; at O1.

    Returns:
        The models, or (models, optimizers), in the form in which they were passed.

    Raises:
        RuntimeError: called a second time, with ``enabled=False`` too; an unknown level, or properties, or
            ``modules``, that contradict it.
        TypeError: ``enabled`` is a text, something is no model, or no optimizer, an optimizer cannot step parameters
            without fp32 masters, or ``modules`` is no dict.
        ValueError: a model is 16-bit already, and not by an earlier call with this dtype; or an unknown dtype, number
            of losses or loss scale.
    """
    result = models if optimizers is None else (models, optimizers)
    if not yes_or_no("amp.initialize", "enabled", enabled):
        session.disable("amp.initialize(enabled=False)")
        return result
    session.require_none("amp.initialize()")
    model_list = as_list(models, "a model", "parameters")
    optimizer_list = [] if optimizers is None else as_list(optimizers, "an optimizer", "step")
    dtype = check_dtype(dtype)
    if cast_model_outputs is not None:
        cast_model_outputs = check_dtype(cast_model_outputs, "cast_model_outputs")
    if not isinstance(num_losses, int) or isinstance(num_losses, bool) or num_losses < 1:
        raise ValueError(f"num_losses must be a positive integer, got {num_losses!r}")
    seed = whole_number("amp.initialize", "rounding_seed", rounding_seed)
    patch = patch_netcl_functions if patch_torch_functions is None else patch_torch_functions
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_netcl": patch,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    rules = module_rules(modules)
    smallest = "float16" if any(rule.dtype == "float16" for rule in rules) else dtype  # that decides about scaling
    chosen = _properties(opt_level, smallest, overrides)
    if rules and not chosen.patch_netcl:
        raise RuntimeError(
            "modules= belongs to opt_level='O1', which casts in netcl's functions: elsewhere nothing is cast between "
            'two parts of a model. For 16-bit parameters as well, handle = amp.init(level="O2", modules=...) and '
            'model, optimizer = amp.decorate(model, optimizer, level="O2")'
        )
    make_scaler = _scaler_maker(chosen.loss_scale, min_loss_scale, max_loss_scale)
    for model in model_list:
        _require_float32(model, chosen)
    require_steppable(optimizer_list, require_kept(chosen.master_weights, "master_weights"))
    if verbosity:
        _print(opt_level, chosen)
    compute = dtype if chosen.patch_netcl else chosen.cast_model_type or "float32"
    policies = session.policies_for("O1")
    given = {name: value for name, value in given_to(initialize, locals()).items() if name != "optimizers"}
    init_call = InitCall("model, optimizer = amp.initialize", ("model", "optimizer"), given, takes_lists=False)
    region = Region(
        chosen.patch_netcl, compute, policies, level=opt_level, init_call=init_call,
        modules=ModuleRules(rules) if rules else None,
    )  # fmt: skip
    outputs = cast_model_outputs or (chosen.cast_model_type and "float32")
    try:
        session.start(region, make_scaler, num_losses)
        for model in model_list if outputs is not None else ():
            cast_calls(model, chosen.cast_model_type, outputs)
            if chosen.cast_model_type in HALF_DTYPES:
                to_16_bit(
                    model,
                    chosen.cast_model_type,
                    optimizer_list,
                    keep_batch_norm=bool(chosen.keep_batchnorm_fp32),
                    keep_master=chosen.master_weights or False,
                    seed=seed,
                )
        if chosen.cast_model_type in HALF_DTYPES:
            session.guard_masters(optimizer_list)
    except BaseException:  # no memory, Ctrl-C: another call may go on from here
        session.end(region)
        raise
    return result


def _require_float32(model: Any, chosen: Properties) -> None:
    """Raises ValueError for a model with 16-bit parameters, but for those that an earlier call made of this one's
    dtype: they have masters, and that call may not have come to its end."""
    dtype = chosen.cast_model_type or "float32"
    is_begun = getattr(type(model), "_input_dtype", None) == dtype
    for index, (_, param, wanted) in enumerate(
        dtypes_of(model, dtype, keep_batch_norm=bool(chosen.keep_batchnorm_fp32))
    ):
        if param.dtype in HALF_DTYPES and not (is_begun and wanted in HALF_DTYPES):
            raise ValueError(
                f"parameter {index} of {type(model).__name__} is {canonical_dtype(param.dtype)}, expected float32: "
                "amp.initialize casts the model itself, do not cast it before"
            )


def _properties(opt_level: str, dtype: str, overrides: dict[str, Any]) -> Properties:
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3'. Note that in `O0`, "
            "`O1`, etc., the prefix O is the letter O, not the number zero."
        )
    chosen = OPT_LEVELS[opt_level]
    if chosen.cast_model_type == "float16":
        chosen = replace(chosen, cast_model_type=dtype)
    given = {name: value for name, value in overrides.items() if value is not None}
    if given.get("cast_model_type") is False:
        given["cast_model_type"] = None
    if (keeps := given.get("keep_batchnorm_fp32")) is not None:
        if not isinstance(keeps, bool) and keeps not in ("True", "False"):
            raise ValueError(f"keep_batchnorm_fp32 must be True, False, 'True', 'False' or None, got {keeps!r}")
        given["keep_batchnorm_fp32"] = keeps in (True, "True")
    if opt_level == "O1":
        _refuse_at_o1(given)
    elif given.get("patch_netcl"):
        raise RuntimeError("patch_netcl_functions=True belongs to opt_level='O1': the other levels cast the model.")
    chosen = replace(chosen, **given)
    if chosen.cast_model_type is not None:
        chosen = replace(chosen, cast_model_type=check_dtype(chosen.cast_model_type, "cast_model_type"))
    if "loss_scale" not in given and "bfloat16" in (chosen.cast_model_type, dtype) and chosen.loss_scale == "dynamic":
        chosen = replace(chosen, loss_scale="off")
    return chosen


def _refuse_at_o1(given: dict[str, Any]) -> None:
    reasons = {
        "cast_model_type": "O1 inserts casts around netcl's functions rather than model weights, which stay fp32. "
        "To cast the model use opt_level='O2' or 'O3'",
        "keep_batchnorm_fp32": "at O1 batch norm's parameters are fp32 anyway, so keep_batchnorm_fp32 should be None",
        "master_weights": "at O1 the model's weights themselves are fp32, so master_weights should be None",
    }
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise RuntimeError(f"{reason}. {name} was {given[name]!r}.")


class _ApexRule(ScaleRule):
    """A rule of which messages speak in apex's names."""

    called: ClassVar[Mapping[str, str]] = {"min": "min_loss_scale", "max": "max_loss_scale"}


def _scaler_maker(loss_scale: str | float, smallest: float | None, largest: float) -> Callable[[], LossScale]:
    if loss_scale == "off":
        return NoLossScale
    if loss_scale == "dynamic":
        rule = _ApexRule(max=largest, min=ScaleRule.min if smallest is None else smallest)
        return lambda: DynamicLossScale(max(rule.min, min(2.0**16, rule.max)), rule)
    require_number("loss_scale", loss_scale)
    try:
        scale = float(loss_scale)
    except (TypeError, ValueError):
        raise ValueError(f"loss_scale must be 'dynamic' or a number, got {loss_scale!r}") from None
    LossScale(scale)  # raises for a number that is no scale
    return lambda: LossScale(scale)


def _print(opt_level: str, chosen: Properties) -> None:
    print(f"Selected optimization level {opt_level}:  {_SAYS[opt_level]}")
    print("Processed optimization properties:")
    for item in fields(chosen):
        print(f"{item.name:22} : {getattr(chosen, item.name)}")


def scale_loss(
    loss: Node,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Node]:
    """Scales a loss for backward and, at the end of the ``with``, unscales the gradients.

    As ``AmpHandle.scale_loss``, with one of the ``num_losses`` scales. An inf or nan makes exactly the next step of
    these optimizers do nothing.

    Args:
        loss: one element, float32 or 16-bit.
        optimizers: the optimizer, or a list of the optimizers, whose parameters this backward reaches.
        loss_id: which scale; from 0 to ``num_losses - 1``.
        model: not used; apex has it.
        delay_unscale, delay_overflow_check: accepted and without effect: the gradients of each pass are unscaled by
            themselves and added to the earlier ones, so nothing is gained by waiting, and nothing is divided twice.

    Raises:
        RuntimeError: AMP is not active, or after ``wrap_optimizer``.
        ValueError: there is no such loss_id, no optimizer, or the loss has more than one element.
        TypeError: the loss is no node or not floating, or an optimizer has no ``params``.
    """
    if (handle := session.active_handle()) is not None:
        return handle.scale_loss(loss, optimizers, loss_id)
    if session.is_disabled():
        return NoOpHandle().scale_loss(loss, optimizers)
    raise RuntimeError(
        "amp.scale_loss was called without AMP: call "
        "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first"
    )

"""
Replaced forwards in a copy of their module: those of accelerate, and those wrapped by users, hold the original as a
method, in a partial or in their closure. Calls to a copied module are redirected to its copy.
"""

import functools
from types import CellType, FunctionType, MethodType

from torch import nn


def rebound(value, copies: dict[nn.Module, nn.Module], within: tuple = ()):
    """
    An attribute of a module, bound to its copy; the value itself if it calls no copied module.

    Args:
        value: Anything; methods, partials and functions are searched.
        copies (`dict[nn.Module, nn.Module]`): The copy of each copied module.
        within (`tuple`): Functions being searched: they may hold themselves.
    """
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, copies.get(value.__self__, value.__self__))
    if isinstance(value, functools.partial):
        args = [copies.get(a, a) if isinstance(a, nn.Module) else a for a in value.args]
        partial = functools.partial(value.func, *args, **value.keywords)
        vars(partial).update(vars(value))
        return partial
    if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):  # compiled; see `isolated`
        return rebound(value._torchdynamo_orig_callable, copies, within)
    if isinstance(value, FunctionType) and value.__closure__ and value not in within:
        cells = tuple(_rebound_cell(cell, copies, (*within, value)) for cell in value.__closure__)
        bound = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        bound.__kwdefaults__ = value.__kwdefaults__
        vars(bound).update(vars(value))
        return bound if cells != value.__closure__ else value
    return value


def _rebound_cell(cell: CellType, copies: dict, within: tuple) -> CellType:
    """A rebound cell; the original, which may be written to, if there is nothing to rebind."""
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return cell
    if isinstance(value, nn.Module):
        bound = copies.get(value, value)
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        bound = rebound(value, copies, within)
    else:
        return cell
    return cell if bound is value or (isinstance(bound, MethodType) and bound == value) else CellType(bound)

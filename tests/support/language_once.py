"""Triton's interpreter patches its language once a launch; it did so for each call of a device function, too.

Importing this is enough; it comes after TRITON_INTERPRET is set. What a launch computes is the same: a second
patch finds the language as the first has left it, and looks at hundreds of names for that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patched: list[ModuleType] = []
"""The language's modules that the launch under way has patched."""


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch`, which does nothing for a device function whose kernel has had the same modules patched."""

    def patch_lang(fn: Any) -> Any:
        langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if _patched and langs and all(lang in _patched for lang in langs):
            return interpreter._LangPatchScope()
        outermost, scope = not _patched, patch(fn)
        _patched.extend(langs)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (_patched.clear(), restore())
        return scope

    return patch_lang


if hasattr(interpreter, "_LangPatchScope"):  # other versions of Triton may do it their own way
    interpreter._patch_lang = _once(interpreter._patch_lang)

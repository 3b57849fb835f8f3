# SPDX-License-Identifier: Apache-2.0
"""griffe extension: the comment behind a field is its documentation, so that the site says what the source says."""

import ast
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        """Fields of classes; a comment that stands inside the value's brackets counts as well."""
        if attr.docstring is not None or not attr.parent or not attr.parent.is_class:
            return
        if not isinstance(node, ast.AnnAssign | ast.Assign) or node.end_lineno is None:
            return
        assert isinstance(
            attr.filepath, Path
        )  # a list: a namespace package, which has no classes
        lines = attr.lines_collection[attr.filepath][node.lineno - 1 : node.end_lineno]
        found = [line.partition("  # ")[2].strip() for line in lines]
        if text := " ".join(filter(None, found)):
            attr.docstring = griffe.Docstring(text[0].upper() + text[1:] + ".", parent=attr)

"""What a plan replaces while it is made."""

import ast
from collections.abc import Iterator

from forked import REPOSITORY

PLAN = REPOSITORY / "src" / "llama_ft" / "plan"
PATCHES = PLAN / "fake" / "patches.py"
# what patches.py may import of llama_ft: nothing that could be patched
NAMES = {"UserError", "MemoryCategory"}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.asname or alias.name) for alias in node.names)


def test_a_plan_patches_no_object_of_llama_ft() -> None:
    """Only one file patches, and it imports nothing of llama_ft that it could patch."""
    for file in PLAN.rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = set(imported(tree))
        ours = {name for module, name in names if module.partition(".")[0] == "llama_ft"}
        if file == PATCHES:
            assert ours == NAMES
            continue
        assert not [module for module, _ in names if module.startswith("unittest")], file
        modules = {name for _, name in names}
        assert not set(replaced(tree)) & modules, file


def replaced(tree: ast.AST) -> Iterator[str]:
    """Names of the objects whose attributes are set: `name.attribute = ...`, `setattr(name, ...)`
    and `name.attribute[key] = ...`."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets = node.args[:1]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) or isinstance(node, ast.Call):
                yield root(target)


def root(expression: ast.expr) -> str:
    """The first name in a chain of attributes and items."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def test_the_check_sees_every_way_to_replace_an_attribute() -> None:
    text = "a.b = 1\nc.d['e'] = 2\nsetattr(f, 'g', 3)\nh.i.j: int = 4\nk = 5\n"
    assert set(replaced(ast.parse(text))) == {"a", "c", "f", "h"}


def test_patches_end_with_their_block() -> None:
    from torch.nn import functional
    from transformers.integrations import hub_kernels

    from llama_ft.plan.fake.patches import planned_models

    def now() -> list[object]:
        sdpa = functional.scaled_dot_product_attention
        return [functional.rms_norm, sdpa, hub_kernels.is_torchdynamo_exporting]

    before = now()
    with planned_models("cuda", lambda sdpa: lambda: sdpa):
        assert not set(now()) & set(before)
    assert now() == before

r"""Read what inference servers do with LoRA adapters from their source, and write the table that
`llama-ft export --for` uses: src/llama_ft/extensions/serving/rules.json.

    python benchmarks/serving/server_rules.py --date 2026-11-28 --vllm 0.32=DIR --vllm 0.33=DIR --tried 0.32 \
      --sglang 0.5.23=DIR

DIR is an unpacked wheel or source archive. Nothing of it is imported: its files are parsed.
"""

import argparse
import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "src/llama_ft/extensions/serving/rules.json"
RENAMES = ("regex", "substr", "prefix", "suffix")  # in the order in which vLLM applies them
MAPPER = "orig_to_new_"
BACKEND = "transformers"  # vLLM computes some models with Transformers' own classes
BACKEND_CLASS = "TransformersForCausalLM"
SERVED_KINDS = ("ForCausalLM", "ForConditionalGeneration")
FIELDS = (
    "hf_to_vllm_mapper",
    "packed_modules_mapping",
    "is_3d_moe_weight",
    "embedding_modules",
    "supports_lora",
)


class Mapper(dict[str, Any]):
    """Stands for vLLM's WeightsMapper when a class body is evaluated."""

    def __init__(self, **tables: Any) -> None:
        super().__init__({name.removeprefix(MAPPER): table for name, table in tables.items()})

    def __or__(self, other: Any) -> "Mapper":
        names = {*self, *other}
        return Mapper(
            **{
                MAPPER + name: {**self.get(name, {}), **other.get(name, {})}
                for name in names - {"renaming"}
            }
        )


class ModelFiles:
    """The files of vllm/model_executor/models: their classes, imports and linear layers.

    Args:
        source: holds the package vllm.
    """

    def __init__(self, source: Path) -> None:
        executor = source / "vllm/model_executor"
        self.classes = dict[str, tuple[str, ast.ClassDef]]()
        self.imports = dict[str, set[str]]()
        self.linears = dict[str, set[str]]()
        of_mamba = set[str]()
        for file in sorted((executor / "layers/mamba").rglob("*.py")):
            of_mamba |= linear_names(ast.parse(file.read_text()))
        for file in sorted((executor / "models").glob("*.py")):
            tree = ast.parse(file.read_text())
            self.imports[file.stem] = imported_modules(tree)
            self.linears[file.stem] = linear_names(tree)
            if ".mamba." in file.read_text():
                self.linears[file.stem] |= of_mamba
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, (file.stem, node))
        registry = ast.parse((executor / "models/registry.py").read_text())
        self.architectures = registered(registry)

    def bases(self, name: str) -> list[str]:
        nodes = self.classes[name][1].bases if name in self.classes else []
        return [getattr(node, "id", getattr(node, "attr", "")) for node in nodes]

    def value(self, name: str, field: str) -> Any:
        """The value of a class's field, or of the next class that it extends; None without one."""
        if name == "SupportsLoRA" and field == "supports_lora":
            return True
        if name not in self.classes:
            return None
        for node in self.classes[name][1].body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == field and node.value is not None:
                return self.evaluate(node.value)
        found = [self.value(base, field) for base in self.bases(name)]
        return next((value for value in found if value is not None), None)

    def evaluate(self, node: ast.expr) -> Any:
        """Evaluate an expression of a class body; other classes answer from their own source."""
        files = self

        class Other:
            def __init__(self, name: str) -> None:
                self.name = name

            def __getattr__(self, field: str) -> Any:
                return files.value(self.name, field)

        names = {name: Other(name) for name in self.classes}
        code = compile(ast.Expression(node), "class body", "eval")
        try:
            return eval(code, {**names, "WeightsMapper": Mapper, "re": re, "regex": re})
        except NameError:
            return None  # a function of the file makes it

    def linears_of(self, name: str) -> set[str]:
        """Names of linear layers in the class's file and in those that it imports."""
        seen = set[str]()
        waiting = [self.classes[name][0]]
        found = set[str]()
        while waiting:
            module = waiting.pop()
            if module not in seen and module in self.imports:
                seen.add(module)
                waiting += self.imports[module]
                found |= self.linears[module]
        return found

    def source_of(self, name: str) -> str:
        """The source of a class and of those that it extends."""
        if name not in self.classes:
            return ""
        own = ast.unparse(self.classes[name][1])
        return "\n".join([own, *map(self.source_of, self.bases(name))])


def imported_modules(tree: ast.Module) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1 or module.startswith("vllm.model_executor.models"):
                found.add(module.rpartition(".")[2])
    return found


def linear_names(tree: ast.Module) -> set[str]:
    """Attributes that are set to a linear layer or to fused experts."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            made = getattr(node.value.func, "id", getattr(node.value.func, "attr", ""))
            is_layer = made.endswith("Linear") or "FusedMoE" in made
            if is_layer and isinstance(target, ast.Attribute):
                found.add(target.attr)
    return found


def registered(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Architecture in config.json -> module and name of its class."""
    found = dict[str, tuple[str, str]]()
    for node in tree.body:
        table = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, name = ast.literal_eval(value)[:2]
                    found[str(key.value)] = (str(module), str(name))
    return found


def rules_of(files: ModelFiles, name: str) -> dict[str, Any]:
    """What vLLM does with the names of an adapter for a class of models."""
    source = files.source_of(name).replace("'", '"')
    packed = dict(files.value(name, "packed_modules_mapping") or {})
    # added when a model is built
    for parent, children in re.findall(r'packed_modules_mapping\["(\w+)"\] = (\[[^\]]+\])', source):
        packed[parent] = ast.literal_eval(children)
    text = re.search(r'language_model=\[?"([^"]+)"', source)
    embeddings = set(files.value(name, "embedding_modules") or {})
    if text:
        for other, (_, made) in files.architectures.items():
            if f'"{other}"' in source:
                embeddings |= set(files.value(made, "embedding_modules") or {})
    names = files.linears_of(name) | embeddings
    names -= packed.keys()
    for children in packed.values():
        names |= set(children)
    rules = dict[str, Any]()
    mapper = files.value(name, "hf_to_vllm_mapper") or {}
    for kind in RENAMES:
        table = dict[str, str]()
        for old, new in mapper.get(kind, {}).items():
            name_ends = getattr(old, "pattern", old)
            # null leaves a tensor of the checkpoint out; quantized tensors have no adapters
            if new is not None and not re.search(r"scale|bias|blocks|MTP", name_ends):
                table[name_ends] = new
        if table:
            rules[kind] = table
    if text:
        rules["text"] = text[1]
    if files.value(name, "is_3d_moe_weight"):
        rules["experts"] = "3d"
    rules["modules"] = sorted(names)
    return rules


@cache
def vllm_rules(source: Path) -> dict[str, Any]:
    """Architecture -> its rules; null if vLLM has no LoRA for it. Those of classes outside of
    vllm/model_executor/models are not read."""
    files = ModelFiles(source)
    table = dict[str, Any]()
    for architecture, (module, name) in files.architectures.items():
        is_elsewhere = module == BACKEND or module.startswith("vllm.")
        if is_elsewhere and not is_served_kind(architecture):
            continue
        if module == BACKEND and name == BACKEND_CLASS:
            table[architecture] = {"modules": "linear"}
        elif is_elsewhere:
            table[architecture] = {"unread": True}
        elif name in files.classes:
            has_lora = bool(files.value(name, "supports_lora"))
            table[architecture] = rules_of(files, name) if has_lora else None
    return table


def is_served_kind(architecture: str) -> bool:
    """Return whether it is a class of published models that answer."""
    return architecture.endswith(SERVED_KINDS) and not architecture.startswith("Transformers")


def sglang_rules(source: Path) -> dict[str, Any]:
    tree = ast.parse((source / "sglang/srt/lora/utils.py").read_text())
    constants = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    known = set(re.findall(r"'([\w.]+)'", constants["_KNOWN_LORA_TARGET_MODULES"]))
    text = (source / "sglang/srt/lora/utils.py").read_text()
    mapping = text.split("params_mapping = {")[1].split("}")[0]
    children = dict(re.findall(r'"(\w+)": "([\w.]+)"', mapping))
    names = known | {child for child, parent in children.items() if parent in known}
    architectures = set[str]()
    for file in (source / "sglang/srt/models").glob("*.py"):
        entry = re.search(r"^EntryClass = (\[[^\]]*\]|\w+)", file.read_text(), re.MULTILINE)
        architectures |= set(re.findall(r"\w+", entry[1])) if entry else set()
    return {"modules": sorted(names), "architectures": sorted(architectures)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--date", required=True, help="when the sources were read")
    parser.add_argument(
        "--tried", action="append", default=[], help="a version that served adapters"
    )
    parser.add_argument("--vllm", action="append", required=True, metavar="VERSION=DIR")
    parser.add_argument("--sglang", action="append", required=True, metavar="VERSION=DIR")
    options = parser.parse_args()
    sources = dict(text.split("=", 1) for text in options.vllm)
    versions = sorted(sources, key=lambda version: [int(part) for part in version.split(".")])
    newest = vllm_rules(Path(sources[versions[-1]]))
    vllm = dict[str, Any]()
    for version in versions:
        source = Path(sources[version])
        lora = (source / "vllm/config/lora.py").read_text()
        ranks = re.search(r"MaxLoRARanks = Literal\[([^\]]+)\]", lora)
        assert ranks is not None
        manager = (source / "vllm/lora/model_manager.py").read_text()
        table = vllm_rules(source)
        differing = {name: rules for name, rules in table.items() if newest.get(name) != rules}
        vllm[version] = {
            "ranks": [int(rank) for rank in ranks[1].split(",")],
            "finds_text_names": "_get_text_lora_names" in manager,
            "unknown": sorted(newest.keys() - table.keys()),
            "architectures": newest if version == versions[-1] else differing,
        }
    sglang = dict[str, Any]()
    for text in options.sglang:
        version, _, source = text.partition("=")
        sglang[version] = sglang_rules(Path(source))
    rules = {"read": options.date, "tried": options.tried, "vllm": vllm, "sglang": sglang}
    TABLE.write_text(as_lines(rules) + "\n")


def as_lines(value: Any, depth: int = 0) -> str:
    """JSON with one line per architecture."""
    if not isinstance(value, dict) or depth > 3 or not value:
        return json.dumps(value)
    inner = [
        f"{' ' * (depth + 1)}{json.dumps(name)}: {as_lines(each, depth + 1)}"
        for name, each in sorted(value.items())
    ]
    return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main()

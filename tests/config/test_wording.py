"""What messages guess was meant."""

from pathlib import Path

from llama_ft.config.messages import nearest_file


def test_a_file_with_another_ending_is_meant_only_where_its_name_is_near(tmp_path: Path) -> None:
    for name in ("NOTICE", "mine.yml", "full"):
        (tmp_path / name).touch()
    meant = {name: nearest_file(tmp_path / name) for name in ("nope.jsonl", "nope.yaml", "nope", "mine.yaml", "ful")}
    assert not meant["nope.jsonl"] + meant["nope.yaml"] + meant["nope"]
    assert meant["mine.yaml"] == f" Did you mean {tmp_path}/mine.yml?" and meant["ful"].endswith("/full?")

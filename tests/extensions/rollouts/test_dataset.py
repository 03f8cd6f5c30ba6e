"""A directory of rounds as the dataset of a run: its token ids are trained on as they were sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import losses, run_cases, write_jsonl
from extensions.rollouts.made_rounds import Totals, write_rounds
from transformers import AutoTokenizer

from llama_ft.config import DataConfig
from llama_ft.config.data_names import kind_of_data
from llama_ft.data import DataRequest, TokenizedData, prepare, two_examples, unpaired_examples
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.dataset import Selection, _description
from llama_ft.extensions.rollouts.rounds import Round, write_unscored

ROUNDS: tuple[Totals, ...] = (
    [[0.5, 1.0, 0.0, 1.0], [None, 2.0, None, None], [1.0, 1.0, None, 1.0], [None, -1.0, -3.0, 0.0]],
    [[0.25, 0.0, 0.0, 0.25]],
)
# of ROUNDS: (round, prompt, answer)
BEST = [(0, 0, 1), (0, 2, 0), (0, 3, 3), (1, 0, 0)]
PAIRS = [((0, 0, 1), (0, 0, 2)), ((0, 3, 3), (0, 3, 2)), ((1, 0, 0), (1, 0, 1))]


@pytest.fixture(scope="module")
def rounds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Round]]:
    folder = tmp_path_factory.mktemp("rounds")
    return folder, write_rounds(folder, tiny_model, *ROUNDS)


def prepared(
    model: Path, folder: Path, cache: Path, examples: Any = None, **settings: Any
) -> TokenizedData:
    config = DataConfig(dataset=str(folder), tokenize_processes=1, **settings)
    request = DataRequest(context_length=64, want_validation=False)
    if examples is not None:
        request = DataRequest(context_length=64, want_validation=False, examples=examples)
    return prepare(config, AutoTokenizer.from_pretrained(model), request, cache)


def rows(data: TokenizedData) -> list[tuple[list[int], list[int]]]:
    assert data.train is not None
    return [(row["input_ids"], row["labels"]) for row in data.train]


def expected_row(made: list[Round], place: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    number, prompt, answer = place
    prompt_ids = made[number].prompts[prompt].token_ids
    answer_ids = made[number].answers[prompt][answer].token_ids.tolist()
    return prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids


def test_sft_trains_on_the_best_answer_to_each_prompt(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    found = prepared(tiny_model, folder, tmp_path)
    assert rows(found) == [expected_row(made, place) for place in BEST]
    assert found.train is not None
    assert found.train["source"][3] == f"{folder}/rollouts/000002 prompt 1"


def test_a_threshold_leaves_worse_answers_out(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    found = prepared(tiny_model, folder / "rollouts", tmp_path, reward_threshold=0.25)
    assert rows(found) == [expected_row(made, place) for place in BEST if place != (0, 3, 3)]
    found = prepared(tiny_model, folder, tmp_path, reward_threshold=0.5, rollouts="all")
    places = [(0, 0, 0), (0, 0, 1), (0, 0, 3), (0, 1, 1), (0, 2, 0), (0, 2, 1), (0, 2, 3)]
    assert rows(found) == [expected_row(made, place) for place in places]


def test_all_answers_need_no_rewards(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    places = [(0, prompt, answer) for prompt in range(4) for answer in range(4)]
    places += [(1, 0, answer) for answer in range(4)]
    found = prepared(tiny_model, folder, tmp_path, rollouts="all")
    assert rows(found) == [expected_row(made, place) for place in places]


def test_a_single_round_is_a_dataset(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    found = prepared(tiny_model, folder / "rollouts/000002", tmp_path)
    assert rows(found) == [expected_row(made, BEST[-1])]


def test_answers_that_are_not_scored_are_not_read_as_texts(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    _, made = rounds
    write_unscored(tmp_path / "kept", made[0])
    for name in ("kept", "kept/rollouts"):
        with pytest.raises(UserError, match="has no complete round of rollouts"):
            prepared(tiny_model, tmp_path / name, tmp_path / "cache")


def test_pairs_are_the_best_and_the_worst_answer(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    found = prepared(tiny_model, folder, tmp_path, two_examples, dataset_format="preference")
    expected = [expected_row(made, place) for pair in PAIRS for place in pair]
    assert rows(found) == expected


def test_labels_are_whether_the_reward_reaches_the_threshold(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, made = rounds
    settings: dict[str, Any] = {"dataset_format": "unpaired_preference", "reward_threshold": 0.5}
    found = prepared(tiny_model, folder, tmp_path, unpaired_examples, **settings)
    assert found.train is not None
    expected = []
    labels = []
    for number, round_totals in enumerate(ROUNDS):
        for prompt, totals in enumerate(round_totals):
            for answer, total in enumerate(totals):
                if total is not None:
                    expected.append(expected_row(made, (number, prompt, answer)))
                    labels.append(total >= 0.5)
    assert rows(found)[::2] == expected
    assert found.train["desirable"][::2] == labels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reward_threshold": 9.0},
            "nothing to train on: 4 answers below --reward_threshold, .* from -3 to 2",
        ),
        (
            {"dataset_format": "unpaired_preference"},
            r"need --reward_threshold: .* desirable \(rewards are from -3 to 2\)",
        ),
        (
            {"dataset_format": "unpaired_preference", "reward_threshold": -3.0},
            "--reward_threshold -3: all answers of .* are desirable; rewards are from -3 to 2",
        ),
        ({"dataset_format": "messages"}, "columns are input_ids, labels, which fit tokenized"),
    ],
)
def test_settings_that_do_not_fit_are_user_errors(
    rounds: tuple[Path, list[Round]],
    tiny_model: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    message: str,
) -> None:
    folder, _ = rounds
    with pytest.raises(UserError, match=message):
        prepared(tiny_model, folder, tmp_path, unpaired_examples, **settings)


def test_rounds_without_anything_to_learn_are_user_errors(tiny_model: Path, tmp_path: Path) -> None:
    write_rounds(tmp_path / "equal", tiny_model, [[1.0, 1.0], [None, 3.0]])
    write_rounds(tmp_path / "none", tiny_model, [[None, None]])
    pairs: dict[str, Any] = {"dataset_format": "preference"}
    with pytest.raises(UserError, match="train on: 1 prompt with equal rewards, 1 prompt with fe"):
        prepared(tiny_model, tmp_path / "equal", tmp_path, two_examples, **pairs)
    with pytest.raises(UserError, match="1 prompt with fewer than two rewards; no answer has a"):
        prepared(tiny_model, tmp_path / "none", tmp_path)


def test_broken_rounds_and_other_tokenizers_are_user_errors(
    tiny_model: Path, tmp_path: Path
) -> None:
    [made] = write_rounds(tmp_path, tiny_model, [[1.0, 0.0]])
    file = tmp_path / "rollouts/000001/prompts.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"index": 0', '"index": 1'))
    with pytest.raises(UserError, match=r"000001/prompts.jsonl: is missing or corrupted"):
        prepared(tiny_model, tmp_path, tmp_path)

    file.write_text(text)
    other = AutoTokenizer.from_pretrained(tiny_model)
    other.add_tokens(["<of another model>"])
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    first, second = (token for token, _ in list(vocabulary["model"]["vocab"].items())[60:62])
    ids = vocabulary["model"]["vocab"]
    for prompt_id in made.prompts[0].token_ids[1:]:
        token = other.convert_ids_to_tokens(prompt_id)
        ids[token], ids[first] = ids[first], ids[token]
    folder = tmp_path / "other"
    other.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="its token ids are of the tokenizer of org/tiny"):
        prepared(folder, tmp_path, tmp_path)


def test_equal_rewards_of_all_answers_are_named(tiny_model: Path, tmp_path: Path) -> None:
    write_rounds(tmp_path, tiny_model, [[0.0, 0.0]], [[0.0, None]])
    text = _description(str(tmp_path), "", Selection("auto", "best", None))
    assert "2 rounds of rollouts, 1 best answer; all rewards are 0; left out:" in text


def test_only_directories_with_complete_rounds_are_rollouts(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rollouts/.000001.tmp").mkdir(parents=True)
    write_jsonl(tmp_path / "rollouts/data.jsonl", [{"text": "a"}])
    assert kind_of_data(str(tmp_path / "rollouts")) == "folder"
    write_rounds(tmp_path, tiny_model, [[1.0, 0.0]])
    assert kind_of_data(str(tmp_path / "rollouts")) == kind_of_data(str(tmp_path)) == "extension"


def test_runs_of_each_objective_train_on_rounds(
    rounds: tuple[Path, list[Round]], tiny_model: Path, tmp_path: Path
) -> None:
    folder, _ = rounds
    mixture = f"[{{path: {folder}}}, {{path: {tmp_path}/more.jsonl}}]"
    cases = {
        "sft": [],
        "dpo": ["--objective", "dpo"],
        "kto": ["--objective", "kto", "--reward_threshold", "0.5"],
        "mixture": ["--dataset", mixture],
    }
    write_jsonl(tmp_path / "more.jsonl", [{"input_ids": [1, 5, 6], "labels": [-100, 5, 6]}])
    common = f"--model_name {tiny_model} --precision fp32 --max_train_step 2"
    common += " --batch_size_training 2 --context_length 64"
    runs = []
    for name, flags in cases.items():
        words = f"{common} --output_dir {tmp_path}/{name}".split()
        dataset = [] if "--dataset" in flags else ["--dataset", str(folder)]
        runs.append([*words, *dataset, *flags])
    finished = run_cases(tmp_path, runs)
    for name in cases:
        assert len(losses(tmp_path / name)) == 2
    assert f"{folder}: 2 rounds of rollouts, 4 best answers; left out: 1 prompt with fewer" in (
        finished.output
    )

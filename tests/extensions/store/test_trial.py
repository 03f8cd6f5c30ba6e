"""recipes/check.py --save_to against a real S3 server, which checks credentials and permissions."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forked import Finished, forked
from stores import SECRET, boto3, environment, s3_server

CHECK = REPOSITORY / "recipes" / "check.py"
WRITER = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"]
READER = ["s3:GetObject", "s3:ListBucket"]
Keys = dict[str, str]


def new_keys(user: str, actions: list[str]) -> Keys:
    """Credentials of a new user who may do these actions."""
    iam = boto3.client("iam")
    iam.create_user(UserName=user)
    allowed = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=user, PolicyName="s3", PolicyDocument=document)
    key = iam.create_access_key(UserName=user)["AccessKey"]
    return {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }


def allow_unchecked(address: str, requests: str) -> None:
    """Let the server check credentials and permissions after so many requests."""
    headers = {"Content-Type": "text/plain"}
    url = f"{address}/moto-api/reset-auth"
    request = urllib.request.Request(url, requests.encode(), headers, method="POST")
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="module")
def users() -> Iterator[dict[str, Keys]]:
    """Credentials on a server with the bucket `runs`, which has one object."""
    with s3_server() as address, environment({"AWS_MAX_ATTEMPTS": "1"}):
        s3 = boto3.client("s3")
        s3.put_object(Bucket="runs", Key="run/notes.txt", Body=b"mine")
        writer = new_keys("writer", WRITER)
        users = {
            "writer": writer,
            "reader": new_keys("reader", READER),
            "unknown": {"AWS_ACCESS_KEY_ID": "AKIAUNKNOWN", "AWS_SECRET_ACCESS_KEY": "unknown"},
            "wrong secret": {**writer, "AWS_SECRET_ACCESS_KEY": SECRET},
        }
        allow_unchecked(address, "0")
        yield users
        allow_unchecked(address, "inf")
        left = [entry["Key"] for entry in s3.list_objects_v2(Bucket="runs")["Contents"]]
        assert left == ["run/notes.txt"]


def check(folder: Path, url: str, keys: Keys, ranks: int = 0) -> Finished:
    flags = ["--output_dir", str(folder), "--megabytes", "1", "--save_to", url]
    finished = forked(CHECK, *flags, ranks=ranks, **keys)
    assert keys["AWS_SECRET_ACCESS_KEY"] not in finished.output
    assert "Traceback" not in finished.output
    return finished


def test_every_rank_writes_reads_and_deletes_an_object(
    users: dict[str, Keys], tmp_path: Path
) -> None:
    finished = check(tmp_path, "s3://runs/run", users["writer"], ranks=2)
    assert finished.exit_code == 0, finished.output
    assert "put, get, delete in the store" in finished.output
    times = re.findall(r"^(\d) .* [\d,]+ ms, [\d,]+ ms, [\d,]+ ms$", finished.output, re.MULTILINE)
    assert times == ["0", "1"]


@pytest.mark.parametrize(
    ("user", "url", "kind", "ranks"),
    [
        ("unknown", "s3://runs/run", "wrong credentials", 0),
        ("wrong secret", "s3://runs/run", "wrong credentials", 0),
        ("writer", "s3://no-such-bucket/run", "no bucket", 0),
        ("reader", "s3://runs/run", "no write access", 2),
    ],
)
def test_a_store_that_cannot_be_used_is_named_in_the_table(
    users: dict[str, Keys], tmp_path: Path, user: str, url: str, kind: str, ranks: int
) -> None:
    finished = check(tmp_path, url, users[user], ranks)
    assert finished.exit_code == 1, finished.output
    rows = re.findall(rf"^(\d) .*  {kind}$", finished.output, re.MULTILINE)
    expected = [str(rank) for rank in range(max(ranks, 1))]
    assert rows == expected, finished.output
    assert f"error: --save_to {url}: {kind} (" in finished.output
    assert f"): rank {', '.join(expected)} on node 0" in finished.output


def test_a_path_is_not_a_store(tmp_path: Path) -> None:
    finished = forked(CHECK, "--output_dir", tmp_path, "--save_to", "runs/run")
    assert finished.exit_code == 2
    assert "--save_to runs/run: expected a URL such as s3://bucket/run." in finished.output

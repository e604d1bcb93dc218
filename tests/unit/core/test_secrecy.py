"""What is a secret, over all forms that stores, databases and Spark have for one."""

from __future__ import annotations

import json
import pickle
import re
import time
from urllib.parse import quote, quote_plus

import pytest
from commands import run
from secret_forms import IN_TEXT, MORE_IN_TEXT, NAMES, NO_SECRETS, SECRET

from qewqew_core import BadArgument, BadKey, BadPath, Corrupt, Locked, Queue
from qewqew_core.arguments import check_key
from qewqew_core.references import is_reference, refuse_in_clear, resolved
from qewqew_core.secrecy import excerpt, hide, secrets_of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelled", [str, str.upper, lambda name: name.replace(".", "").replace("_", "").lower()])
def test_a_name_tells_of_a_secret_however_it_is_spelled(name, spelled):
    for value in SECRET, 424242, 1, 0.5:
        assert [*secrets_of(spelled(name), value)] == [str(value)]
        assert str(value) not in hide(f"it says {value}.", {spelled(name): value})
    for value in True, "true", "", None, {"env": "X"}, '{"file": "/run/secrets/x"}':
        assert not [*secrets_of(spelled(name), value)]
    assert [*secrets_of("client", {"deep": [{name: SECRET}]})] == [SECRET]
    assert [*secrets_of("client", json.dumps({"deep": [{name: SECRET}]}))] == [SECRET]
    assert SECRET not in hide(f"cannot connect: x={SECRET[0]};{name} = '{SECRET}'; or else")


@pytest.mark.parametrize("text", IN_TEXT)
def test_a_secret_is_found_in_urls_and_texts(text):
    assert [*secrets_of("anything", text)] == [SECRET]
    assert hide(f"cannot connect to {text}") == f"cannot connect to {text.replace(SECRET, '…')}"
    assert hide(hide(text)) == hide(text)
    assert hide(f"{hide(text)} or not") == f"{hide(text)} or not"
    with pytest.raises(BadArgument, match="'anything' has a password or another secret in clear text") as caught:
        refuse_in_clear("output", {"anything": text})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", MORE_IN_TEXT)
def test_a_secret_is_hidden_with_what_is_beside_it(text):
    assert SECRET in "".join(secrets_of("anything", text))
    assert SECRET not in hide(text)


@pytest.mark.parametrize(("name", "value"), NO_SECRETS)
def test_what_is_none_is_taken_and_shown(name, value):
    refuse_in_clear("output", {name: value})
    assert hide(f"{name}: {value}") == f"{name}: {value}"


@pytest.mark.parametrize(
    "part",
    [
        "a=",
        "a",
        "//a:b",
        "//a:",
        "password='",
        "pwd=",
        "-----BEGIN ",
        " = ",
        "jdbc:oracle:x:",
        "jdbc:oracle:x:a/",
        "%",
        "a:/",
        "https://",
        "-u a:",
        "\n- a: ",
        "'a': ",
        "identified by ",
        "cookie:",
        "'-u', '",
        "password=[",
        "password={{",
        'password={"env"',
        "password='' ",
        "password:\n ",
        "'value': 'a', ",
        "'name': 'password', 'a': 'b', ",
        "authorization: digest response ",
        "http:/a:",
        "https:\\/\\/a:",
        "a://b:c",
        "a://b:/@",
        "password:\n- a\n",
        "password: |\n a\n",
        "password: a, b ",
        "tokens:\n - 1\n",
        "password:\n\n",
        ", token: string",
        "'--password=a",
        "--password=a,",
        "password=(xx'''' ",
        "password=([{'",
        "token=lower(",
        "token = lower(token), ",
        "password $a$",
        "password=$$a",
        "access_key=arn:aws:a:b:1:c",
        "docker -u a:b ",
        "outlook.office.com/webhook/",
        "-u \"a:-u 'a:",
        "'value': 'a'b",
        "password: a\n  b",
        "token=a;\n",
        "{password: [",
        "password='{{ a }}' ",
        "passwordminmin=a ",
        "token: expected a b ",
        "<name>token<",
        "name=password ",
        "a:b://",
        "a://u:b",
        "password='a'b",
        "password=a(",
        "password={{ 'a' ",
        "mysql -p",
        "\x1b[1mpassword\x1b[0m=a ",
        "\x1b[1",
        '("password", ',
        "<password><![CDATA[",
        "<password a='b' c='d' ",
        "password=<<EOF\na\n",
        "options (pin 'a', ",
    ],
)
def test_a_long_text_is_searched_in_proportion_to_its_length(part):
    def seconds(length):
        begun = time.process_time()
        hide((part * length)[:length])
        return time.process_time() - begun

    assert seconds(400_000) < 40 * seconds(40_000) + 0.5


def test_what_was_read_for_a_reference_is_hidden_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setenv("DB_URL", f"jdbc:postgresql://me:{SECRET}@host/db")
    monkeypatch.setenv("TABLE", "orders")
    (tmp_path / "file").write_text("hushfile\n")
    options = {"url": {"env": "DB_URL"}, "dbtable": {"env": "TABLE"}, "password": json.dumps({"file": str(tmp_path / "file")})}
    assert all(map(is_reference, options.values()))
    assert resolved({**options, "n": 1, "client": {"token": {"env": "TABLE"}, "x": "y"}}) == {
        "url": f"jdbc:postgresql://me:{SECRET}@host/db",
        "dbtable": "orders",
        "password": "hushfile",
        "n": 1,
        "client": {"token": "orders", "x": "y"},
    }
    assert hide(f"no {SECRET} and no hushfile") == "no … and no …"
    monkeypatch.delenv("DB_URL")
    with pytest.raises(BadArgument, match="'url' refers to the environment variable 'DB_URL', which is not set"):
        resolved(options)


def test_what_a_reference_gave_is_hidden_whatever_its_option_is_called(tmp_path, monkeypatch):
    (tmp_path / "lines").write_text("first line\nsecond one\r\nend\n")
    given = {
        "region": "us",
        "strict": "false",
        "n": "1",
        "fetchsize": "1000",
        "innocent": "hunter2",
        "pin": "12",
        "url": "hush-hush",
    }
    for name, value in given.items():
        monkeypatch.setenv(name.upper(), value)
    resolved({name: {"env": name.upper()} for name in given} | {"x": {"file": str(tmp_path / "lines")}})
    shown = "us 1 1000 false end hunter22 xhunter2 123"  # too short to be a secret, or only a part of a word
    assert hide(shown) == shown
    assert hide("(hunter2) 12 hush-hush/x") == "(…) … …/x"
    assert hide("first line second one") == "… …"
    assert "hunter2" not in str(BadPath("cannot reach 'hunter2'", path="/x/hunter2/y"))


@pytest.mark.parametrize(
    "value", ["hush\\hush", 'it\'s "hush"', "hüsh!hush", "first hush\nsecond88", "first hush\r\nsecond88\r\n", "a/b+c=d&e f%g"]
)
def test_what_a_reference_gave_is_hidden_however_it_is_written(value, monkeypatch):
    monkeypatch.setenv("GIVEN", value)
    resolved({"innocent": {"env": "GIVEN"}})
    written = [repr(value), repr(value.encode()), json.dumps(value), json.dumps(value, ensure_ascii=False), repr({"x": value})]
    for text in [*written, quote(value, safe=""), quote_plus(value)]:
        assert re.search(r"hush|second|it's|a/b|a%2Fb|sh!", hide(text)) is None, hide(text)
    assert hide(f"x\\n{value.splitlines()[-1]} y") == "x\\n… y"


@pytest.mark.parametrize("before", range(0, 64, 3))
def test_a_text_is_cut_when_its_secrets_are_hidden(before):
    shown = excerpt("x" * before + f"https://me:{SECRET}@host/x" * 3, 60)
    assert "hush" not in shown
    assert len(shown) <= 60
    assert "hush" not in excerpt([f"https://me:{SECRET}@h"], 20)
    assert [excerpt(value, 9) for value in (None, "None", [1, "a"], "x" * 9)] == ["None", "'None'", "[1, 'a']", "'xxxxxxxx"]
    with pytest.raises(BadKey) as caught:
        check_key("/" * (70 + before) + f"https://me:{SECRET}@host/x")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", IN_TEXT)
def test_no_error_has_a_secret(text):
    for error in BadPath(f"cannot use {text}"), Locked("used", path=text), Corrupt("wrong", path=f"{text}", offset=1):
        assert SECRET not in str(error)
        assert SECRET not in error.what
        assert SECRET not in str(pickle.loads(pickle.dumps(error)))  # noqa: S301


def test_a_pair_of_a_name_and_a_value_is_found_in_json():
    for name in "name", "key":
        assert [*secrets_of("x", [{name: "password", "value": SECRET}, {name: "user", "value": "me"}])] == [SECRET]


@pytest.mark.parametrize(
    "value", [{"env": ""}, {"env": 1}, {"env": "A", "file": "B"}, {}, "env", '{"env": ', {"other": "A"}, None]
)
def test_anything_else_is_no_reference(value):
    assert not is_reference(value)


def test_what_a_list_refers_to_is_read_too(monkeypatch):
    monkeypatch.setenv("GIVEN", "hunter3")
    assert resolved({"x": [{"y": {"env": "GIVEN"}}, {"env": "GIVEN"}, 1]}) == {"x": [{"y": "hunter3"}, "hunter3", 1]}


@pytest.mark.parametrize("command", ["import {} {}", "metrics {} --output {}", "put {} --file {}", "ls {1}"])
def test_no_error_of_the_system_shows_a_secret_on_the_command_line(command, tmp_path):
    run("put", tmp_path / "q", "a")
    for place in f"/nowhere/x?token={SECRET}", f"/nowhere/https://me:{SECRET}@h/x":
        done = run(*command.format(tmp_path / "q", place).split())
        assert done.exit_code
        assert SECRET not in done.output
        assert "nowhere" in done.output


def test_a_file_url_with_a_secret_names_no_directory(tmp_path):
    with Queue(tmp_path / "q") as q:
        q.put(b"a")
        batch = q.lease("key")
        with pytest.raises(BadArgument, match="does not name a directory") as caught:
            batch.publish(f"file://{tmp_path}/d?password={SECRET}")
        assert SECRET not in str(caught.value)
        with pytest.raises(BadPath, match="without NUL"):
            batch.publish(f"{tmp_path}/a\0b")
    assert sorted(each.name for each in tmp_path.iterdir() if not each.name.startswith("q")) == []


def test_the_command_line_takes_no_secret(tmp_path):
    for option in (
        f"secret={SECRET}",
        f'client_kwargs={{"aws_secret_access_key": "{SECRET}"}}',
        f"endpoint_url=http://me:{SECRET}@h",
    ):
        done = run("publish", tmp_path / "q", "b-1", "memory://x", "--option", option)
        assert (done.exit_code, "in clear text" in done.stderr, SECRET in done.stderr) == (2, True, False)

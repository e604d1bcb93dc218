"""Texts with secrets, made of names, forms and values, and texts of programs that have none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from json import dumps
from urllib.parse import quote

from secret_forms import SECRET

NAMES = [
    *("password", "DB_PASSWORD", "passwd", "pwd", "client_secret", "clientSecret", "aws.secret.access.key", "api-key", "apiKey"),
    *("token", "accessToken", "session_token", "jwt", "fernet_key", "secret_id", "auth_key", "ssh_key", "creds", "otp_code"),
    *("pin_code", "cookie_value", "passphrase", "sasl.password", "spark.ssl.keyStorePassword", "credential", "webhook_url"),
]
FIRST, LAST = "hush", "hushhush"  # a secret begins and ends so, and has a sign or something else between
BETWEEN = [
    *("", "7", "-", "_", ".", "/", "+", "=", "!", "?", "#", "%", "^", "*", "~", "|", ":", ";", ",", "&", "@", "$", "<", ">"),
    *(
        "'",
        '"',
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "`",
        "\\",
        "ü",
        "秘密",
        "🔑",
        "1234567890",
        "aGVsbG8+d29ybGQ/",
        "$$",
        "((",
        "x'(",
        "a,b",
    ),
]

# What each form does with a value, so that it can be read again: names and values are put into {n} and {v}
FORMS = {
    "json": ('{{"a": 1, "{n}": {v}, "b": [2]}}', dumps),
    "json in json": ("{v}", lambda value: value),  # see `texts`
    "python repr": ("{{'user': 'me', '{n}': {v}, 'x': None}}", repr),
    "keyword of a call": ("connect(host='h', {n}={v}, port=1)", repr),
    "assignment": ("self.{n} = {v}", repr),
    "yaml": ("a: b\n{n}: {v}\nc: d", str),
    "yaml, quoted": ("a:\n  - {n}: {v}\n    c: d", dumps),
    "env": ("USER=me\n{n}={v}\nHOME=/", str),
    "export": ("$ export {n}={v}", str),
    "properties": ("user = me\n{n} = {v}\n", str),
    "traceback": ('  File "x.py", line 3, in f\n    connect({n}={v})\nOSError: {n}={v}', repr),
    "command line": ("Command 'x --{n}={v} --verbose' failed", str),
    "command line, two words": ("run: x --{n} {v} --verbose", str),
    "list of arguments": ("Command {v} returned 1", lambda value: value),
    "java": ("java -D{n}={v} -jar x.jar", str),
    "spark": ("spark-submit --conf spark.{n}={v} x.py", str),
    "text": ("cannot connect with {n}={v} to h", str),
    "text, colon": ("cannot connect with {n}: {v}", str),
    "query": ("GET https://h/p?a=b&{n}={v}&c=d", lambda value: quote(value, safe="")),
    "jdbc": ("jdbc:sqlserver://h:1433;user=me;{n}={v};ssl=true", str),
    "xml": ("<x><{n}>{v}</{n}></x>", lambda value: value.replace("&", "&amp;").replace("<", "&lt;")),
    "xml, with spaces and attributes": (
        "<a:{n} xmlns:a='http://h/{n}#x' type=\"b\" >\n hush {v}\n</a:{n}>",
        lambda value: value.replace("&", "&amp;").replace("<", "&lt;"),
    ),
    "hadoop, with spaces": (
        "<property>\n<name>{n}</name>\n<value>hush\t{v} {v}</value></property>",
        lambda value: value.replace("&", "&amp;").replace("<", "&lt;"),
    ),
    "cdata": ("<{n}><![CDATA[hush {v}]]></{n}>", lambda value: value.replace("<", "")),
    "hadoop": (
        "<property><name>{n}</name><value>{v}</value></property>",
        lambda value: value.replace("&", "&amp;").replace("<", "&lt;"),
    ),
    "header of curl": ("curl -H 'X-{n}: {v}' https://h", lambda value: value.replace("'", "")),
    "kubernetes": ("env:\n- name: {n}\n  value: {v}\n- name: X\n  value: y\n", dumps),
    "pair": ('("{n}", {v})', dumps),
    "first pair": ("OrderedDict([('{n}', {v}), ('x', 'y')])", repr),
    "pair of pairs": ("((b'{n}' , b{v}),)", lambda value: repr(value) if value.isascii() else "'" + value + "'"),
    "colours": ("\x1b[1;33m{n}\x1b[0m\x1b[2m = \x1b[0m\x1b[32m{v}\x1b[0m and\x1b[K", repr),
    "colours, as JSON writes them": ('"\\u001b[1m{n}:\\u001b[0m {v}"', lambda value: dumps(dumps(value))[1:-1]),
    "names in words": ("x\nsecret key: {v}\nSecret access key = {v}", str),
    "triple quotes": ("{n} = '''\n{v}\n'''\nx = 1", lambda value: value.replace("'", "")),
    "heredoc": ("{n} = <<EOF\na b {v}\n  c {v}\nEOF\n", str),
    "properties, on two lines": ("a = b\n{n}=\\\n  {v}\nc = d", str),
    "diff of yaml": ("+  {n}: |\n+    x {v}\n-  {n}: |\n-    {v}\n", str),
    "options of spark": ('CREATE TABLE t USING jdbc OPTIONS ({n} "{v}")', lambda value: dumps(value)[1:-1]),
    "option": ('df.write.option("{n}", {v}).save()', dumps),
}
UNNAMED = {
    "url": ("cannot reach postgresql://me:{v}@h:5432/d", lambda value: quote(value, safe="")),
    "url, as it is": ("cannot reach https://me:{v}@h/x", str),
    "url, its user has @": ("https://me@home:{v}@h/x", str),
    "url in json": ('{{"url": "https:\\/\\/me:{v}@h\\/x"}}', lambda value: dumps(value)[1:-1]),
    "token in a url": ("git clone https://{v}@h/x.git", lambda value: quote(value, safe="")),
    "token in a url in json": ('"https:\\/\\/{v}@h"', lambda value: quote(value, safe="")),
    "curl": ("id curl -u 'me:{v}' https://h", lambda value: value.replace("'", "")),
    "header": ("sent Authorization: Bearer {v}", lambda value: quote(value, safe="")),
    "header of curl": ("curl -H 'Authorization: Basic {v}' h", lambda value: quote(value, safe="")),
    "cookie": ('Cookie: a="{v}"', lambda value: value.replace('"', "")),
    "sql": ("CREATE USER me IDENTIFIED BY '{v}'", lambda value: value.replace("'", "''")),
    "oracle": ("ALTER USER me IDENTIFIED BY VALUES '{v}'", lambda value: value.replace("'", "''")),
    "postgres": ("ALTER ROLE me PASSWORD '{v}'", lambda value: value.replace("'", "''")),
}


def texts() -> Iterator[tuple[str, str]]:
    """What it is, and a text in which what a secret ends with must not be seen: thousands, the same each time."""
    values = [f"{FIRST}{each}{LAST}" for each in BETWEEN]
    for form, (text, written) in FORMS.items():
        for name, value in zip(cycle(NAMES), values * 3, strict=False):
            said = text.format(n=name, v=written(value))
            if form == "json in json":
                said = dumps({"x": dumps({name: value, "y": 1})})
            elif form == "list of arguments":
                said = text.format(v=["x", f"--{name}", value, "-v"])
            yield f"{form}: {name}", said
    for form, (text, written) in UNNAMED.items():
        for value in values:
            yield form, text.format(v=written(value))


# Forms in which secrets were shown once
LISTED = [
    *(f"https://me@home:a/{SECRET}@h/x", f"https://me@home:a@b/{SECRET}@h/x", f"postgresql://u:a@b/{SECRET}@h:5432/d"),
    *(f"postgresql://u:{each}@h/d" for sign in '$<"=' for each in (f"a{sign}{SECRET}", f"{sign}{SECRET}/x", f"{sign}a/{SECRET}")),
    *(rf'"https:\/\/{SECRET}@h/x"', rf'{{"u":"https:\/\/hooks.slack.com\/services\/T0\/B0\/{SECRET}"}}'),
    *(f"run curl -H 'Authorization: Bearer {SECRET}' https://h", f'curl -H "Authorization: {SECRET}" h'),
    *(f"sent Authorization: {scheme}{SECRET}" for scheme in ("", "Token ", "Custom ", "ApiKey ", "Basic ")),
    *(f'Cookie: a="{SECRET}"; b=c', f'Cookie: a="x"; b="{SECRET}"', f"Set-Cookie: sid={SECRET}; Path=/"),
    *(
        f"{it} -u user:{SECRET} h"
        for it in ("id curl", "docker exec install curl", "cp x y; curl", "my id", "/usr/bin/install http")
    ),
    *(f"curl -ume:{SECRET} h", f"curl -sSu me:{SECRET} h"),
    *(
        f"{before}password=a{sign}{SECRET}"
        for before in ("", "x ", "u=a;", "u=a&", "(u=a,", '"', "export ", "['a', ")
        for sign in "'\"({,;&"
    ),
    *(f"password=${{env}}-{SECRET}", f"password=${{PASSWORD:-{SECRET}}}", f"CREATE USER me IDENTIFIED BY VALUES '{SECRET}'"),
    f"CREATE USER me IDENTIFIED BY {SECRET}",
    str(["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", SECRET, "-----END PRIVATE KEY-----"]),
    f"> -----BEGIN PRIVATE KEY-----\n> MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n> {SECRET}\n> -----END PRIVATE KEY-----",
    *(
        f"{name}{sign}{SECRET}"
        for name in ("fernet_key", "secret_id", "auth_key", "ssh_key", "creds", "otp_code", "pin_code", "cookie_value")
        for sign in ("=", ": ", " = ", '="')
    ),
]
LINES = [f"{each}{SECRET}" for each in ("spark.hadoop.fs.s3a.secret.key ", "ENV PASSWORD ", "password   | ", "setenv API_KEY\t")]
LINES += [f"{each} {SECRET}" for each in ("passphrase", "apikey", "accessKey", "secretAccessKey", "ENV passphrase")]
LINES += [f"client_secret {SECRET}==", f"api.key {SECRET}="]
# and which nobody listed
OTHERS = [
    *(f"file:/u:{SECRET}@/tmp/x", f"/a/file:/u:{SECRET}@/tmp", f"s3:///u:{SECRET}@b/x"),
    *(f"bindpw={SECRET}", f"olcRootPW: {SECRET}", f"smtpPw={SECRET}", f"db_pw: {SECRET}"),
    *(str(["mysql", "-u", "x", f"-p{SECRET}"]), str(["sshpass", "-p", SECRET, "ssh"]), str(["docker", "login", "-p", SECRET])),
    *(f"log: password: {SECRET}", f"mysql -u root -p{SECRET} db", f"sshpass -p {SECRET} ssh h", f"run x --password {SECRET} y"),
    *(f"<password>{SECRET}</password>", f"<property><name>fs.s3a.secret.key</name>\n<value>{SECRET}</value></property>"),
    *(f'<property name="password" value="{SECRET}"/>', f'df.write.option("password", "{SECRET}")', f'.setPassword("{SECRET}")'),
    *(f'conf.set("fs.s3a.secret.key", "{SECRET}")', f'os.environ["TOKEN"] = "{SECRET}"', f"machine h login me password {SECRET}"),
    *(
        f"password: str = '{SECRET}'",
        f"def f(password: str = '{SECRET}')",
        f"sqlplus scott/{SECRET}@h",
        f"password={{{{ x or '{SECRET}' }}}}",
    ),
    *(
        f'Map("password" -> "{SECRET}")',
        f"Map(password -> {SECRET})",
        f'val password: String = "{SECRET}"',
        f"API key = {SECRET}",
        f"private key: {SECRET}",
    ),
    *(f"[('password', '{SECRET}')]", f'BasicAuth("me", "{SECRET}")', f'CREATE SECRET (TYPE s3, SECRET "{SECRET}")'),
    *(
        f'<password type="x">{SECRET}</password>',
        f'<input type="password" value="{SECRET}">',
        f"<a:password>{SECRET}</a:password>",
    ),
    *(
        f"Key (token)=({SECRET}) already exists.",
        f"Duplicate entry '{SECRET}' for key 'users.token'",
        f"me:{SECRET}@tcp(h:3306)/d",
    ),
    *(f"SET PASSWORD FOR me = '{SECRET}'", f"password\\u003d{SECRET}", f"bad token {SECRET}1234", f"the password is '{SECRET}7'"),
    *(
        f"API Key: {SECRET}",
        f"\x1b[1mpassword\x1b[0m={SECRET}",
        f"docker run -ePASSWORD={SECRET} x",
        f"Private-Lines: 1\n{SECRET}",
    ),
    *(
        f"{begin}{'aB3' * 3}{SECRET}{'x4' * 9}"
        for begin in ("xapp-1-A012-", "xoxe-1-", "xoxd-", "xoxe.xoxp-1-", "whsec_", "ya29.a0")
    ),
    *(f"{begin}{SECRET}aB3aB3aB3aB3aB3a" for begin in ("GOCSPX-", "1//0g", "hvr.", "s.")),
    f"xoxd-aB3dE5fG7hI%2B{SECRET}",
    *(f'"password=x\xa0{SECRET}"', f"basic.auth.user.info=me:{SECRET}"),
    *(f"{name} key: {SECRET}" for name in ("api", "secret", "access", "Secret access", "storage account")),
    f"https://api.telegram.org/bot1:{SECRET}/x",
    f"it said eyJhbGciOiJub25lIn0.eyJ{SECRET}.{SECRET}",
]

"""The forms in which people write secrets: for the tests of each place that must not show them."""

from __future__ import annotations

SECRET = "hushhush"  # noqa: S105

NAMES = [
    *("password", "sslpassword", "trustStorePassword", "passwd", "pwd", "oauth2.accessToken", "private_key", "secret"),
    *("fs.s3a.secret.key", "fs.s3a.access.key", "sasl.password", "es.net.http.auth.pass", "sfPassword", "credentials"),
    *("temporary_aws_secret_access_key", "fs.key", "fs.azure.account.key.name.dfs", "fs.azure.sas.box.name", "token"),
    *("private_key_file_pwd", "spark.sql.catalog.lake.credential", "header.Authorization", "kafka.sasl.jaas.config"),
    *("connection_string", "parquet.encryption.key.list", "passphrase", "api_key", "s3.session-token", "client.secret"),
    *("jwt", "passcode", "hmac_key", "license_key", "google.cloud.auth.service.account.json.keyfile.content"),
    *("cookie", "otp", "pin", "webhook", "slack_webhook_url"),
]

IN_TEXT = [
    *(f"jdbc:postgresql://h/d?user=u&password={SECRET}", f"jdbc:postgresql://u:{SECRET}@h/d", f"mongodb://u:{SECRET}@h"),
    *(f"jdbc:oracle:thin:scott/{SECRET}@//h:1521/x", f"jdbc:sqlserver://h;user=u;pwd={SECRET}", f"redis://:{SECRET}@h"),
    *(f"jdbc:mysql://h/d?user=u&Password={SECRET}", f"jdbc:mysql://h/d?p%61ssword={SECRET}", f"s3a://KEY:{SECRET}@bucket/x"),
    *(f"jdbc:snowflake://h/?private_key_pwd={SECRET}", f"jdbc:mysql://address=(host=h)(password = {SECRET})/d"),
    *(f"jdbc:postgresql://h/d?sslpassword={SECRET}", f"jdbc:mysql://h/d?trustCertificateKeyStorePassword={SECRET}"),
    *(f'x required username="u" password="{SECRET}";', f"AccountName=a;AccountKey={SECRET};E=x", f"jdbc:x://h;pwd={{{SECRET}}}"),
    *(f"Endpoint=sb://h/;SharedAccessKey={SECRET}", f"https://h/a?x=1&sig={SECRET}", f"a=password={SECRET}"),
    *(f"Authorization: Bearer {SECRET}", f"jdbc:bigquery://h:443;OAuthPvtKey={SECRET}", f"spark://u:{SECRET}@h:7077"),
    f"-----BEGIN RSA PRIVATE KEY-----{SECRET}",
    *(f"https://{SECRET}@h/x", f"https://{SECRET}:@h", f"git+https://{SECRET}:x-oauth-basic@h/x.git", f"http://u:{SECRET}@h:80/"),
    *(f"https:/u:{SECRET}@h/x", f"/data/https:/{SECRET}@h/x", f"https://h/x?token={SECRET}", f"https://h?a=1&sig={SECRET}"),
    *(f"https://hooks.slack.com/services/{SECRET}", f"https://x.webhook.office.com/webhookb2/{SECRET}"),
    *(f"Authorization: Basic {SECRET}", f"Cookie: {SECRET}; and more", f"curl -u me:{SECRET} https://h", f"--user=me:{SECRET}"),
    *(f"CREATE USER me IDENTIFIED BY '{SECRET}'", f"ALTER USER me IDENTIFIED WITH x BY '{SECRET}' ACCOUNT UNLOCK"),
    *(f"ALTER USER me IDENTIFIED BY PASSWORD '{SECRET}'", f"CREATE ROLE me LOGIN PASSWORD '{SECRET}'"),
    *(f"{{'password': '{SECRET}', 'user': 'me'}}", f'x={{"password": "{SECRET}"}}', f'x "{{\\"token\\": \\"{SECRET}", "'),
    *(f"x {{'name': 'password', 'value': '{SECRET}'}}", f"{{password: {SECRET}, user: me}}", f"user: me\npassword: {SECRET}"),
    f"x:\n  - api_key: '{SECRET}' # here",
    *(f"password=b'{SECRET}'", f"password => '{SECRET}'", f"{{b'password': b'{SECRET}'}}"),
    f'[{{"name": "password", "type": "x", "value": "{SECRET}"}}]',
    *(f'[{{"value": "{SECRET}", "name": "DB_PASSWORD"}}]', f"x:\n- name: DB_PASSWORD\n  value: {SECRET}\n"),
    *(f"x:\npassword:\n  {SECRET}\n", f"x:\npassword: >-\n  {SECRET}", f"x:\n'password': {SECRET}"),
    f'Authorization: Digest username="u", response="{SECRET}"',
    *(f"Command '['curl', '-u', 'me:{SECRET}', 'h']' failed", f"Command ['x', '--password', '{SECRET}'] failed"),
    *(f"not 'https://h/q?token={SECRET}' here", f"not ('password={SECRET}')"),
    *(f"http://me@home:{SECRET}@h/", f'"https:\\/\\/me:{SECRET}@h"'),
    *(f"https://x.outlook.office.com/{hook}/{SECRET}" for hook in ("webhook", "webhookb2")),
    *(f"x:\n  password:\n  - {SECRET}\n", f"x:\npasswords:\n  - '{SECRET}'\nuser: me", f"x:\npassword: !!str {SECRET}"),
    *(f"ALTER ROLE me PASSWORD {quoted}" for quoted in (f"E'{SECRET}'", f"$${SECRET}$$", f"$x${SECRET}$x$", f"U&'{SECRET}'")),
    *(
        f"CREATE LOGIN me WITH PASSWORD = N'{SECRET}'",
        f"COPY t SECRET_ACCESS_KEY '{SECRET}'",
        f"{{user: me, password: {SECRET}}}",
    ),
]
MORE_IN_TEXT = [  # what is hidden with what is beside it
    *(f"password=['{SECRET}']", f"{{'password': ('me', '{SECRET}')}}", f"password='it''s {SECRET}'", f"pwd=('{SECRET}')"),
    *(f"Password=SecretStr('{SECRET}')", f"{{'password': SecretStr('{SECRET}')}}"),
    *(f"jdbc:mysql://u:a{odd}{SECRET}@h:3306/d?x=a" for odd in (";", "/", "#", "?", "/b#c?d")),
    f'"https:\\/\\/me:a/{SECRET}@h"',
    *(f"x:\n  password: a{odd}{SECRET} # note\n" for odd in (" ", ", ", ",", ";", "&", "'", " b c ")),
    *(f"password:\n- a\n- {SECRET}", f"password: [a, {SECRET}]", f"password: |\n  a b\n  c {SECRET}\nuser: me"),
    *(f"password=['a]{SECRET}']", f"pwd=('a)', '{SECRET}')", f"x={{'pwd': X('a)b', ['{SECRET}'])}}", f"pwd={{a}}}}{SECRET}}}"),
    *(f"['x', '{dash}password=a{odd}{SECRET}', 'y']" for dash in ("--", "-D") for odd in (",", ";", "&", " ")),
    *(f'"--password=a,{SECRET}"', f"'password=a;{SECRET}'", f'{{"x": "\\"--password=a {SECRET}\\""}}', f"--password=a,{SECRET}"),
    *(f"ALTER ROLE me PASSWORD E'a\\'{SECRET}'", f"IDENTIFIED BY $x$a$$ '{SECRET}$x$", f"token=md5('{SECRET}')"),
]

SCHEMA = '{"type":"struct","fields":[{"name":"password","type":"string","nullable":true,"metadata":{}}]}'
NO_SECRETS = [
    *(("url", "jdbc:postgresql://h:5432,h2:5432/d?user=a@b"), ("path", "hdfs://nn:8020/data/user@x"), ("path", "s3a://bucket/x")),
    *((name, "x") for name in ("key", "primaryKey", "kafka.key.serializer", "keyspace", "tokenizer", "user", "dbtable")),
    *((name, "x") for name in ("passwordCharacterEncoding", "password_file", "private_key_file", "s3.access-key-id")),
    *((name, "x") for name in ("fs.s3a.aws.credentials.provider", "sasl.oauthbearer.token.endpoint.url", "authMechanism")),
    *((name, "x") for name in ("spark.kubernetes.driver.secrets.db", "spark.kubernetes.executor.secretKeyRef.X")),
    *((f"spark.kubernetes.{who}.secretKeyRef.DB_PASSWORD", "db-secret:password") for who in ("driver", "executor")),
    *(("spark.kubernetes.driver.secrets.db-secret", "/etc/secrets"), ("compass", "n"), ("--auth", "kerberos")),
    *(("spark.kubernetes.driver.annotation.vault.hashicorp.com/agent-inject-secret-db", "database/creds/db"),),
    *((name, 256) for name in ("spark.io.encryption.keySizeBits", "spark.authenticate.secretBitLength", "session.token.ttl")),
    *(("write.metadata.metrics.column.api_key", "none"), ("password_column", "pw"), ("path", "s3a://b/password=1/x")),
    *(("path", "/lake/token=abc/x"), ("path", "file:///a:b@c/d")),
    *((name, "x") for name in ("shopping", "ping", "cookie_policy", "cookie.path", "webhook_id", "spin", "session_id")),
    *((name, 512) for name in ("tokens", "max_new_tokens", "num_secrets", "n_api_keys")),
    *(("anything", f"{url}@host/x") for url in ("ssh://user", "git+ssh://git", "hdfs://user", "abfs://box", "wasbs://box")),
    *(
        ("url", "https://h:8443/@x"),
        ("anything", "docker run -u 1000:1000 x"),
        ("anything", "--user me"),
        ("anything", "tokens=5"),
    ),
    *(("anything", f"it says WHERE token = {it}") for it in ("1", "?", "%s", ":token", "$1")),
    *(("anything", "WHERE token=?"), ("anything", "id BIGINT, password STRING"), ("anything", "{password: string}")),
    *((name, SCHEMA) for name in ("schema", "avroSchema", "--schema")),
    *(("anything", SCHEMA), ("anything", '{"password": {"type": "string"}}'), ("anything", "struct<password:string>")),
    *((name, "x") for name in ("container.image.pullSecrets", "google.cloud.auth.service.account.json.keyfile", "secretary")),
    *((name, "x") for name in ("delegation.token.binding", "token-expires-in-ms", "--password-env", "api_key_header")),
    *(("--credentials", "/etc/gcp.json"), ("--cols", '{"token": "string"}'), ("--types", "token=STRING,pin=INT")),
    *(("--join", "l.session_token=r.session_token"), ("anything", "GOOGLE_APPLICATION_CREDENTIALS=/etc/gcp.json")),
    *(("anything", text) for text in ("WHERE token = %(token)s", "password=${DB_PASSWORD}", "password={{ conn.x }}")),
    *(("anything", 'secret={"env": "NAME"}'), ("--cookie", "no"), ("anything", "use '--password', or '--file'")),
    *(("anything", "jdbc:hive2://h:10000/d;auth=noSasl"), ("--auth", "plain"), ("token.provider.type", "x")),
    *((name, "s3v4") for name in ("signature_version", "password_policy", "token.min.length", "token.refresh.interval")),
    *((f"{it}.key", "arn:aws:kms:eu-west-1:123456789012:key/ab-cd") for it in ("fs.s3a.encryption", "encryption")),
    ("kms.master_key", "projects/p/locations/eu/keyRings/r/cryptoKeys/k"),
    *(("anything", f"it says SET token = {of}") for of in ("lower(token)", "upper(trim(o.token))", "F.lower(F.col(token))")),
    *(("anything", f"{it} -u app:staff x") for it in ("chown", "rsync", "docker exec", "sudo")),
    *(("anything", f"x://h:{port}/a/b@c") for port in ("8080", "port", "${PORT}", "{port}", "<port>", "%s")),
    ("anything", "jdbc:sqlserver://h:1433;user=a@b"),
    *(
        ("anything", text)
        for text in ("x:\nsecrets:\n  - db\n", "x:\ntoken:\n  enabled: x\n", "x:\n    token: str | None = None")
    ),
    *(("query", "SELECT * FROM orders WHERE id = 1"), ("fetchsize", 1000), ("max_tokens", 5), ("useCredentials", True)),
]

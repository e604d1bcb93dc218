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
]

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
    *(("query", "SELECT * FROM orders WHERE id = 1"), ("fetchsize", 1000), ("max_tokens", 5), ("useCredentials", True)),
]

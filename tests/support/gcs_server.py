"""Google Cloud Storage as `obstore` uses it, on a loopback port: the S3 server behind a proxy.

The XML API of Google Cloud Storage has the requests and answers of S3, apart from the headers of conditional requests.
So this shows which requests vfsd makes for gs://, and that it understands the answers; not how Google answers.  No
registry that CI uses has an emulator with the XML API.

Source: https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

from __future__ import annotations

import json

from tests.support.s3_server import AUTHORIZATION, FaultyProxy

_GENERATION = "x-goog-if-generation-match"


class GcsProxy(FaultyProxy):
    """Translates requests to those of the S3 server at a port."""

    def headers(self, received: dict[str, str]) -> dict[str, str]:
        headers = {name.lower(): value for name, value in received.items()}
        generation = headers.pop(_GENERATION, None)
        assert generation in {None, "0"}, f"{_GENERATION}: {generation}"
        if generation is not None:  # "0": the object must not exist
            headers["if-none-match"] = "*"
        return {**headers, "authorization": AUTHORIZATION}


def gcs_options(port: int) -> dict[str, str]:
    """The options of `open_storage` for the proxy at a port."""
    account = {
        "gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    return {"google_service_account_key": json.dumps(account), "allow_http": "true"}

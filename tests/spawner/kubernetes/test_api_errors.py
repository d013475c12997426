"""What a failed call of the cluster's API is to the user."""

from __future__ import annotations

import json

from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.spawner.kubernetes.attempt import api_refused


def test_a_used_up_quota_may_pass_and_is_told_with_its_figures() -> None:
    error = ApiException(status=403, reason="Forbidden")
    said = "exceeded quota: compute, requested: requests.cpu=1, used: requests.cpu=4, limited: requests.cpu=4"
    error.body = json.dumps({"message": f'pods "jupyter-ada" is forbidden: {said}'}).encode()
    refusal = api_refused(error)
    assert (refusal.status_code, refusal.refusal) == (503, "quota-exceeded")
    assert said in refusal.jupyterhub_message
    assert "Nothing is reserved for you" in refusal.jupyterhub_message

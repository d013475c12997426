"""The kinds of objects that the stand-in API server keeps."""

from __future__ import annotations

from dataclasses import dataclass

METADATA_FIELDS = frozenset({"metadata.name", "metadata.namespace"})


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    has_status: bool = False
    """Whether its status is written through the subresource only."""
    returns_deleted: bool = False
    """Whether DELETE answers with the object instead of a Status."""
    fields: frozenset[str] = METADATA_FIELDS
    """What a field selector may name."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_POD_FIELDS = {
    "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
    "status.phase", "status.podIP", "status.nominatedNodeName",
}  # fmt: skip
_EVENT_FIELDS = {
    "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
    "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
    "reason", "reportingComponent", "source", "type",
}  # fmt: skip
_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io"

RESOURCE_GROUP = "resource.k8s.io"

PODS = Kind("pods", "Pod", has_status=True, returns_deleted=True, fields=METADATA_FIELDS | _POD_FIELDS)
NODES = Kind(
    "nodes", "Node", namespaced=False, has_status=True, fields=frozenset({"metadata.name", "spec.unschedulable"})
)
NAMESPACES = Kind(
    "namespaces",
    "Namespace",
    namespaced=False,
    has_status=True,
    returns_deleted=True,
    fields=frozenset({"metadata.name", "status.phase"}),
)
SERVICE_ACCOUNTS = Kind("serviceaccounts", "ServiceAccount", returns_deleted=True)
CONFIG_MAPS = Kind("configmaps", "ConfigMap")
ROLES = Kind("roles", "Role", _RBAC)
ROLE_BINDINGS = Kind("rolebindings", "RoleBinding", _RBAC)
CLUSTER_ROLES = Kind("clusterroles", "ClusterRole", _RBAC, namespaced=False)
CLUSTER_ROLE_BINDINGS = Kind("clusterrolebindings", "ClusterRoleBinding", _RBAC, namespaced=False)
POLICIES = Kind(
    "validatingadmissionpolicies", "ValidatingAdmissionPolicy", _ADMISSION, namespaced=False, has_status=True
)
POLICY_BINDINGS = Kind(
    "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", _ADMISSION, namespaced=False
)
RESOURCE_QUOTAS = Kind("resourcequotas", "ResourceQuota", has_status=True)
LIMIT_RANGES = Kind("limitranges", "LimitRange")
RESOURCE_SLICES = Kind(
    "resourceslices", "ResourceSlice", RESOURCE_GROUP, namespaced=False, returns_deleted=True,
    fields=frozenset({"metadata.name", "spec.nodeName", "spec.driver"}),
)  # fmt: skip
RESOURCE_CLAIMS = Kind("resourceclaims", "ResourceClaim", RESOURCE_GROUP, has_status=True, returns_deleted=True)
CLAIM_TEMPLATES = Kind("resourceclaimtemplates", "ResourceClaimTemplate", RESOURCE_GROUP, returns_deleted=True)
DEVICE_CLASSES = Kind("deviceclasses", "DeviceClass", RESOURCE_GROUP, namespaced=False)
PRIORITY_CLASSES = Kind("priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False)

QUEUES = Kind("queues", "Queue", "scheduling.run.ai", "v2", namespaced=False, has_status=True)

KINDS = (
    PODS,
    NODES,
    NAMESPACES,
    SERVICE_ACCOUNTS,
    ROLES,
    ROLE_BINDINGS,
    CLUSTER_ROLES,
    CLUSTER_ROLE_BINDINGS,
    CONFIG_MAPS,
    Kind("secrets", "Secret", fields=METADATA_FIELDS | {"type"}),
    Kind("events", "Event", fields=METADATA_FIELDS | _EVENT_FIELDS),
    Kind("services", "Service", has_status=True, returns_deleted=True),
    Kind("persistentvolumeclaims", "PersistentVolumeClaim", has_status=True, returns_deleted=True),
    Kind("persistentvolumes", "PersistentVolume", namespaced=False, has_status=True, returns_deleted=True),
    Kind("leases", "Lease", "coordination.k8s.io"),
    Kind("daemonsets", "DaemonSet", "apps", has_status=True),
    Kind("deployments", "Deployment", "apps", has_status=True),
    Kind("ingresses", "Ingress", "networking.k8s.io", has_status=True),
    Kind("networkpolicies", "NetworkPolicy", "networking.k8s.io"),
    RESOURCE_QUOTAS,
    LIMIT_RANGES,
    RESOURCE_SLICES,
    RESOURCE_CLAIMS,
    CLAIM_TEMPLATES,
    DEVICE_CLASSES,
    QUEUES,
    PRIORITY_CLASSES,
    POLICIES,
    POLICY_BINDINGS,
)

_BY_PATH = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}


def find_kind(group: str, version: str, plural: str) -> Kind | None:
    return _BY_PATH.get((group, version, plural))

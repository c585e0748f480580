"""Several nodes on one machine: network namespaces with links that can be slow, or cut."""

from xshard.testing.nodes.cluster import Cluster, NodesError, nodes
from xshard.testing.nodes.network import NoNodesError

__all__ = ["Cluster", "NoNodesError", "NodesError", "nodes"]

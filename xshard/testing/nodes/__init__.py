"""Several nodes on one machine: network namespaces with links that can be slow, or cut."""

from xshard.testing.nodes.cluster import Cluster, NodesError, NoNodesError, nodes

__all__ = ["Cluster", "NoNodesError", "NodesError", "nodes"]

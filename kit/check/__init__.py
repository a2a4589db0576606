"""Survey the machines of a cluster and measure their links."""

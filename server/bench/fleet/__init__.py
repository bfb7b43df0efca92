"""Several servers and workers on one registry and one store behind one proxy, while parts of them are killed."""

"""What makes forward passes on a processor quicker and changes nothing else; `unbind bench cpu` measures each alone."""

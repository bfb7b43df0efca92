"""Systems that leave the weights alone: modules, edits of states, other decoding, filters of prompts and answers. One file each."""

"""How the world of a setting is made of packages: base model, rows, reference models, modules. One stage a file."""

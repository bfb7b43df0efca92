#!/bin/sh
# Makes the secrets of docker-compose.yml in the folder secrets/ (or the one that is named), and .env, which tells compose where they
# are. What is there already stays as it is, so running it again does no harm.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-./secrets}
# The folder keeps others on this machine out; containers read the files in it as users of their own.
mkdir -p "$folder"
chmod 700 "$folder"

write() {
    [ -s "$folder/$1" ] || { printf '%s\n' "$2" >"$folder/$1.new" && chmod 444 "$folder/$1.new" && mv "$folder/$1.new" "$folder/$1"; }
}
# First, as a command that fails within an argument ends no script: without openssl there would be files of nothing.
admin=$(openssl rand -hex 32)
grafana=$(openssl rand -hex 16)
postgres=$(openssl rand -hex 32)
write admin_key "$admin"
write grafana_password "$grafana"
write postgres_password "$postgres"
write database_url "postgresql+psycopg://unbind:$(cat "$folder/postgres_password")@postgres/unbind"

touch .env
[ -z "$(tail -c 1 .env)" ] || echo >>.env # its last line may have no end
grep -q '^SECRETS_FOLDER=' .env || printf 'SECRETS_FOLDER=%s\n' "$folder" >>.env

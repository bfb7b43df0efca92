#!/bin/sh
# Makes the secrets of docker-compose.yml in the folder secrets/ (or the one that is named, once), and .env, which tells compose where
# they are. What is there already stays as it is, so running it again does no harm.
set -eu
cd "$(dirname "$0")/.."
# Compose reads the folder that .env names: secrets anywhere else would be nobody's.
known=$(sed -n 's/^SECRETS_FOLDER=//p' .env 2>/dev/null | tail -n 1)
folder=${1:-${known:-./secrets}}
if [ -n "$known" ] && [ "$known" != "$folder" ]; then
    echo "secrets.sh: .env has SECRETS_FOLDER=$known; move that folder to $folder and change the line, or name $known" >&2
    exit 1
fi
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

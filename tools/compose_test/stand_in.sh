#!/usr/bin/env bash
# stand_in.sh PREFIX TAG: make an image TAG in place of python:3.11-slim, for machines that reach no
# registry: files of this Debian's essential packages, and of the Python 3.11 below PREFIX. Needs root.
# It holds this machine's accounts: publish it nowhere.
set -euo pipefail
prefix=$1 tag=$2
path=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
certificates=etc/ssl/certs/ca-certificates.crt
# Beyond the essential packages: what Python's own modules, TLS and `useradd` load.
wanted=" adduser ca-certificates libacl1 libattr1 libaudit1 libbsd0 libbz2-1.0 libc6 libcap-ng0 libcap2
 libcom-err2 libcrypt1 libexpat1 libffi8 libgcc-s1 libgdbm6 libgmp10 libgssapi-krb5-2 libk5crypto3
 libkeyutils1 libkrb5-3 libkrb5support0 liblz4-1 liblzma5 libmd0 libncursesw6 libnsl2 libpam-modules
 libpam-runtime libpam0g libpcre2-8-0 libreadline8 libselinux1 libsemanage2 libsepol2 libsqlite3-0
 libssl3 libstdc++6 libsystemd0 libtinfo6 libtirpc3 libuuid1 libzstd1 netbase openssl passwd tzdata
 zlib1g "

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
for name in bin sbin lib lib64; do
    mkdir -p "$root/usr/$name"
    ln -s "usr/$name" "$root/$name"
done
mkdir -p "$root"/{dev,etc,proc,root,run,sys,tmp,usr/local}
chmod 1777 "$root/tmp"

names=$(dpkg-query -Wf '${db:Status-Status} ${Essential} ${Package}\n' | while read -r status essential name; do
    if [[ $status == installed && ($essential == yes || ${wanted//$'\n'/ } == *" $name "*) ]]; then echo "$name"; fi
done)
# Files and links, by the places that /bin and the like lead to.
{ dpkg-query -L $names; printf '/etc/%s\n' passwd group shadow gshadow; } | grep '^/' |
    grep -vE '^/usr/share/(doc|info|locale|man)/' | sort -u | while IFS= read -r file; do
    if [[ -L $file || -f $file ]]; then echo "$file"; fi
done | sed -E 's#^/(bin|sbin|lib|lib64)/#/usr/\1/#; s#^/##' |
    tar -C / --no-recursion --ignore-failed-read -cf - -T - | tar -C "$root" -xf -

programs=$(cd "$prefix" && ls -d bin/python bin/python3 bin/python3.11 2>/dev/null || true)
tar -C "$prefix" --exclude=__pycache__ --exclude=test --exclude=site-packages --exclude='config-3.11-*' \
    --exclude='*.a' -cf - lib $programs | tar -C "$root/usr/local" -xf -
mkdir -p "$root/usr/local/lib/python3.11/site-packages"

# The authorities that this machine trusts: it may reach its package index through one.
mkdir -p "$root/$(dirname $certificates)"
cp --remove-destination -L "/$certificates" "$root/$certificates"
printf '[global]\ncert = /%s\n' "$certificates" > "$root/etc/pip.conf"

chroot "$root" /sbin/ldconfig
env -i PATH="$path" chroot "$root" python3.11 -m ensurepip
ln -sf pip3 "$root/usr/local/bin/pip"
tar -C "$root" --numeric-owner -cf - . | docker import --change "ENV PATH=$path LANG=C.UTF-8" \
    --change 'CMD ["python3"]' --change 'LABEL sluice.stand-in=1' - "$tag"

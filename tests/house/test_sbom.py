"""The list of what is in an image names packages so that a database of flaws finds them."""

from __future__ import annotations

from tools.sbom import component


def test_a_debian_package_is_named_with_its_distribution() -> None:
    found = component("libc6 2:2.39+dfsg-0ubuntu8", "ubuntu-24.04")
    assert (found["name"], found["version"]) == ("libc6", "2:2.39+dfsg-0ubuntu8")
    assert found["purl"] == "pkg:deb/ubuntu/libc6@2%3A2.39%2Bdfsg-0ubuntu8?distro=ubuntu-24.04"

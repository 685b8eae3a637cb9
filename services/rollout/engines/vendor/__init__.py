"""What the adapters of vLLM and SGLang share: the thread that runs a vendor's client, the
samples of one request, and the end of the vendor's processes. Nothing here imports a vendor
package.
"""

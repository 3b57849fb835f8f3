/* SPDX-License-Identifier: Apache-2.0
 * Gives NVIDIA's TensorRT bindings the handful of C functions they link against, forwarded to TensorRT-RTX.
 * With it `tensorrt.plugin` can be imported and plugins registered where no GPU and no TensorRT are; a network
 * with a plugin layer cannot be built that way.
 */
#include <dlfcn.h>
#include <stdlib.h>

static void* forwarded(const char* name) {
  static void* library;
  if (library == NULL) library = dlopen(getenv("TENSORRT_RTX_LIBRARY"), RTLD_NOW | RTLD_GLOBAL);
  return library == NULL ? NULL : dlsym(library, name);
}

#define FORWARD(result, name, parameters, arguments)                 \
  result name parameters {                                           \
    result(*function) parameters = (result(*) parameters)forwarded(#name); \
    return function arguments;                                       \
  }
#define ABSENT(result, name, parameters, value) \
  result name parameters { return value; }

FORWARD(void*, getPluginRegistry, (void), ())
FORWARD(void*, getBuilderPluginRegistry, (int capability), (capability))
FORWARD(void*, createInferBuilder_INTERNAL, (void* logger, int version), (logger, version))
FORWARD(void*, createInferRuntime_INTERNAL, (void* logger, int version), (logger, version))
ABSENT(void*, createInferRefitter_INTERNAL, (void* engine, void* logger, int version), NULL)
ABSENT(void*, createNvOnnxParser_INTERNAL, (void* network, void* logger, int version), NULL)
ABSENT(void*, createNvOnnxParserRefitter_INTERNAL, (void* refitter, void* logger, int version), NULL)
ABSENT(int, getNvOnnxParserVersion, (void), 0)
ABSENT(_Bool, initLibNvInferPlugins, (void* logger, const char* names), 1)

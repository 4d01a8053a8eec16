/* The parts of Python's stable ABI that the library uses. They are declared here because Python's headers are of one version
 * and one build of Python, and the library serves all of them. The functions are found in the interpreter that loads it. */
#ifndef TEMPLATE_PYTHON_H
#define TEMPLATE_PYTHON_H

#include <stddef.h>
#include <sys/types.h>

struct object { ssize_t references; struct object *type; };

typedef struct object *(*method)(struct object *self, struct object *arguments);
typedef int (*visitor)(struct object *object, void *data);
typedef int (*traverse)(struct object *object, visitor visit, void *data);

enum { WITH_TUPLE = 1, WITH_NOTHING = 4, WITH_OBJECT = 8 }; /* METH_VARARGS, METH_NOARGS, METH_O */
enum slot { SLOT_BASE = 48, SLOT_DEALLOC = 52, SLOT_DEL = 53, SLOT_TRAVERSE = 71, SLOT_FINALIZE = 80 };

struct method_def { const char *name; method function; int arguments; const char *doc; };

struct module_def {
    struct object head;
    void *init, *index, *copy;
    const char *name, *doc;
    ssize_t state_size;
    const struct method_def *methods;
    void *slots, *traverse, *clear, *free;
};

#define OF_PYTHON extern __attribute__((weak))
OF_PYTHON int PyArg_ParseTuple(struct object *arguments, const char *format, ...);
OF_PYTHON struct object *Py_BuildValue(const char *format, ...);
OF_PYTHON struct object *PyModuleDef_Init(struct module_def *def);
OF_PYTHON struct object *PyBytes_FromString(const char *text);
OF_PYTHON int PyBytes_AsStringAndSize(struct object *bytes, char **text, ssize_t *size);
OF_PYTHON struct object *PyContext_CopyCurrent(void); /* not of the stable ABI, but of every version since 3.7 */
/* Nor are these. */
OF_PYTHON void *PyInterpreterState_Get(void);
OF_PYTHON void *PyInterpreterState_Head(void);
OF_PYTHON void *PyInterpreterState_Next(void *interpreter);
OF_PYTHON void *PyInterpreterState_ThreadHead(void *interpreter);
OF_PYTHON void *PyThreadState_Next(void *thread);
OF_PYTHON ssize_t PyObject_Size(struct object *object);
OF_PYTHON struct object *PyList_New(ssize_t size);
OF_PYTHON struct object *PyList_GetItem(struct object *list, ssize_t index); /* borrowed */
OF_PYTHON ssize_t PyList_Size(struct object *list);
OF_PYTHON int PyList_Append(struct object *list, struct object *item);
OF_PYTHON struct object *PyTuple_GetItem(struct object *tuple, ssize_t index); /* borrowed */
OF_PYTHON ssize_t PyTuple_Size(struct object *tuple);
OF_PYTHON int PyObject_GC_IsTracked(struct object *object);
OF_PYTHON void *PyType_GetSlot(struct object *type, int slot);
OF_PYTHON int PySys_AddAuditHook(int (*hook)(const char *event, void *arguments, void *data), void *data);
OF_PYTHON int Py_FinalizeEx(void);
OF_PYTHON void Py_IncRef(struct object *object);
OF_PYTHON void Py_DecRef(struct object *object);
OF_PYTHON void PyOS_BeforeFork(void);
OF_PYTHON void PyOS_AfterFork_Child(void);

#endif
